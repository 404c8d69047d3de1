"""The commands and the Python programs in the documents, each run as a user would paste it."""

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import PAGES, Block, blocks
from tests.end_to_end import cluster_stub
from tests.programs import run_python
from tests.source_files import ROOT

FEW_STEPS = "--train.steps 4 --schedule.warmup_steps 1 --train.eval_samples 4"
# A model of the size of a test, with the data of the quickstart or of the page.
TINY = (
    "--model.num_layers 2 --model.hidden_size 32 --model.num_heads 4 --model.seq_length 32 --train.compile none"
    " --train.micro_batch_size 1 --train.global_batch_size 8 --schedule.warmup_steps 1 --checkpoint.every 2"
)
ONE_TEST = "tests/unit/parallel/test_fields.py"
SMALL_BENCH = "--rounds 2 --steps 1 --warmup 1 --layers 1 --hidden 64 --vocab 256"

# What is run instead of a part of a command: training of minutes is shortened by settings, other programs by their
# arguments; files of a user, and names of the hub, become files that the test makes.
CHANGES = {
    # training of 20 steps or more
    "runs/profiled --train.steps 20": "runs/profiled --train.steps 20 --train.eval_samples 4",
    "--train.steps 20": FEW_STEPS,
    "runs/compiled --train.steps 50": f"runs/compiled {FEW_STEPS}",
    "runs/wide --train.steps 50": f"runs/wide {FEW_STEPS}",
    "bash scripts/quickstart.sh": f"bash scripts/quickstart.sh {FEW_STEPS}",
    "--zero.stage 1 --run.dir runs/stage-1": f"--zero.stage 1 --run.dir runs/stage-1 {FEW_STEPS}",
    "--train.steps 600 --run.dir runs/longer": f"--run.dir runs/longer {FEW_STEPS}",
    "--zero.stage 0 --run.dir runs/alone": f"--zero.stage 0 --run.dir runs/alone {FEW_STEPS}",
    "--run.dir runs/from-deepspeed": f"--run.dir runs/from-deepspeed {FEW_STEPS}",
    "--run.dir runs/packed": f"--run.dir runs/packed {FEW_STEPS}",
    "--config configs/shakespeare.yaml": f"--config configs/shakespeare.yaml {FEW_STEPS}",
    "--run.dir runs/launched": f"--run.dir runs/launched {FEW_STEPS} --checkpoint.every 2",
    "slurm.sbatch $run": "slurm.sbatch $run --train.steps 8",
    "hostfile.sh $run": "hostfile.sh $run --train.steps 10",
    "slurm.sbatch --config configs/gpt/1.3b.yaml": f"slurm.sbatch --config configs/gpt/1.3b.yaml {TINY} --train.steps 4"
    " --data.path runs/quickstart/data/stdlib",
    "--nodes=4 scripts/launch/slurm.sbatch --config configs/gpt/6.7b.yaml": "--nodes=4 scripts/launch/slurm.sbatch"
    f" --config configs/gpt/6.7b.yaml {TINY} --train.steps 4",
    "--nodes=8 scripts/launch/slurm.sbatch --config configs/gpt/6.7b.yaml": "--nodes=8 scripts/launch/slurm.sbatch"
    f" --config configs/gpt/6.7b.yaml {TINY} --train.steps 6",
    "--train.eval_samples 256 --train.sample_every 0": f"--train.sample_every 0 {FEW_STEPS}",
    # two nodes: their interpreter is a stub, which checks the settings
    "NNODES=2 RDZV=node0:29500": "NNODES=2 RDZV=node0:29500 PYTHON=python_of_a_node",
    # this machine has fewer cores
    "--nproc_per_node=8": "--nproc_per_node=2",
    "--workers 32": "--workers 2",
    # files of a user, and names of the hub
    "/data/my-corpus": "my-corpus",
    "--tokenizer gpt2 --output runs/data/corpus": "--tokenizer tokenizer.json --output runs/data/corpus",
    # dry runs of the whole paper
    "reproduce.sh   ": "reproduce.sh figure1 ",
    # dry runs of eight rows
    "-m lab.published.planner  ": "-m lab.published.planner Megatron_v1.1_A100-36x3072-n4-s1024-b16 ",
    # measurements
    "step_time.sh --rounds 14 --steps 1": f"step_time.sh {SMALL_BENCH}",
    "zero-2,zero-3]' --rounds 14 --steps 1": f"zero-2,zero-3]' {SMALL_BENCH}",
    "--output runs/mup/study": f"--output runs/mup/study --variants 'muP, width 32' -- {FEW_STEPS}",
    "--output runs/fp8/study": f"--output runs/fp8/study --variants bf16 blockwise -- {FEW_STEPS}",
    "--output runs/characters/study": f"--output runs/characters/study -- {FEW_STEPS}",
    "--output runs/learning/small": f"--output runs/learning/small --variants adamw muon -- {FEW_STEPS}",
    "--output runs/learning/second": f"--output runs/learning/second --variants adamw -- {FEW_STEPS}",
    "--output runs/learning/large": f"--output runs/learning/large --variants adamw -- {FEW_STEPS}",
    "--megabytes 64": "--megabytes 1 --folders docs lab",
    "runs/ladder --tokens_per_parameter 2": "runs/ladder --tokens_per_parameter 0.02 --sizes 1x32 1x64 2x64",
    # the whole suite
    "bash scripts/test.sh": f"bash scripts/test.sh {ONE_TEST}",
    "scripts/test.sh  ": f"scripts/test.sh {ONE_TEST} ",
    "scripts/test.sh -n 0 --pdb": f"scripts/test.sh -n 0 {ONE_TEST}",
}
# Commands that must end with an error here: (exit code, a part of the error).
ERRORS = {
    # There is no network.
    "python -m data.prepare --source HuggingFaceFW/fineweb-edu": (2, "cannot load the tokenizer gpt2"),
    "python -m data.prepare --source Skylion007/openwebtext": (2, "cannot load the tokenizer gpt2"),
    "scripts/speedrun.sh nanogpt-124m": (2, "cannot load the tokenizer gpt2"),
    "scripts/acceptance.sh --gpus 4": (2, "--gpus=4: this machine has 0"),
    "scripts/acceptance.sh --long": (2, "--data=runs/data/openwebtext"),
}
# Commands that are not run, with the reason.
NOT_RUN = {
    "python -m lab.paper.today": "dry runs of minutes",
    "bash scripts/jsonl_to_scores.sh": "installs lm-evaluation-harness",
    "python -m lab.faults.two_nodes": "needs network namespaces; test_two_nodes.py does the same",
    "pip install 'setuptools<81' wheel": "installs DeepSpeed",
    "DS_ACCELERATOR=cpu": "needs DeepSpeed",
    "torchrun --nproc_per_node=8 pretrain_gpt.py --train.initial_weights Meta-Llama-3-8B": "needs Llama 3's weights",
}
# What a page asks for in a sentence before its commands, and the files of a user that it speaks of.
BEFORE = {
    "docs/data.md": "seq 9000 > input.txt",
    "docs/deepspeed.md": "bash scripts/quickstart.sh",
    "docs/launch.md": "bash scripts/quickstart.sh; echo localhost > hosts.txt",
    "docs/model.md": "python -m data.prepare --source stdlib --output runs/quickstart/data/stdlib"
    " --train_vocab_size 8192; python -c 'from transformers import GPT2Config as C, GPT2LMHeadModel as M;"
    ' M(C(n_layer=1, n_embd=32, n_head=4, vocab_size=300)).save_pretrained("gpt2")\'',
    "docs/published/README.md": "grep -e ^id -e V100-36x3072 configs/published/rows.csv > my-rows.csv",
    "docs/sizes.md": 'mkdir my-corpus; python -c \'for n in range(400): print({"text": f"{n} green bottles " * 40})\''
    " | tr \"'\" '\"' > my-corpus/a.jsonl; cp README.md held-out.txt;"
    " python -m data.prepare --source README.md --output runs/own --train_vocab_size 400;"
    " cp runs/own.tokenizer.json tokenizer.json",
}

BASH = {str(page.relative_to(ROOT)): list(blocks(page)) for page in PAGES}
PROGRAMS = [
    (block.page, block.line, block.text)
    for page in BASH.values()
    for block in page
    if block.language == "python" and "start_world()" in block.text
]  # others are run in the order of their page, or are excerpts, which zero/scenarios/test_examples.py runs


def is_complete(block: Block) -> bool:
    """Return if a block of Python is a program of one process."""
    return (
        block.language == "python" and block.text.startswith(("import", "from")) and "start_world()" not in block.text
    )


def to_run(block: Block) -> list[str]:
    """Return the lines of a script that runs a block and stops at the first error; one for each command."""
    if is_complete(block):
        return [f"python - <<'END'\n{block.text}END"]
    return [line_to_run(command) for command in block.commands()] if block.language == "bash" else []


def line_to_run(command: str) -> str:
    if any(command.startswith(begin) for begin in NOT_RUN):
        return f": {shlex.quote(command)}"
    for begin, (code, text) in ERRORS.items():
        if command.startswith(begin):
            return f"ends_with {code} {shlex.quote(text)} {command}"
    for old, new in CHANGES.items():
        command = command.replace(old, new)
    return command


PROLOGUE = """
ends_with() {
    local code=0 said
    said=$("${@:3}" 2>&1) || code=$?
    echo "$said"
    [[ $code == "$1" && $said == *"$2"* ]]
}
set -e
"""


def make_environment(clone: Path, stubs: Path) -> None:
    """Make a .venv in the clone that is the environment of this test, with the stubs in front of its programs."""
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/activate").write_text(f'PATH="{stubs}:{Path(sys.executable).parent}:$PATH"\n')
    write_program(clone / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
    requirements = hashlib.sha256((clone / "requirements.txt").read_bytes()).hexdigest()
    (clone / ".venv/complete").write_text(f"{sys.version.split()[0]} {requirements}\n")  # as scripts/setup.sh
    stubs.mkdir()
    for stub in cluster_stub.STUBS:
        write_program(stubs / stub.__name__, f'exec "{sys.executable}" -m tests.end_to_end.cluster_stub "$0" "$@"')


def write_program(path: Path, command: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{command}\n")
    path.chmod(0o755)


def test_the_tables_name_commands_of_the_documents():
    commands = [
        command for page in BASH.values() for block in page if block.language == "bash" for command in block.commands()
    ]
    text = "\n".join(commands)
    assert not [old for old in CHANGES if old not in text]
    assert not [begin for begin in [*ERRORS, *NOT_RUN] if not any(command.startswith(begin) for command in commands)]
    assert BEFORE.keys() <= BASH.keys()


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page, found in BASH.items() if any(map(to_run, found))], ids=str)
def test_the_commands_of_a_page_run_in_a_clean_clone(page: str, tmp_path: Path):
    clone, stubs = tmp_path / "clone", tmp_path / "stubs"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    make_environment(clone, stubs)
    lines = [line_to_run(BEFORE[page])] if page in BEFORE else []
    for block in BASH[page]:
        lines += [line for command in to_run(block) for line in (f"echo {shlex.quote('$ ' + command)}", command)]
    script = tmp_path / "script.sh"
    script.write_text(PROLOGUE + "\n".join(lines) + "\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PYTEST", "WANDB"))
    }
    environment |= {"PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(clone)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        ended = subprocess.run(["bash", script], cwd=clone, env=environment, stdout=file, stderr=subprocess.STDOUT)
    text = output.read_text()
    assert ended.returncode == 0, text[-8000:]
    assert "Traceback" not in text


@pytest.mark.full
@pytest.mark.parametrize(("page", "line", "text"), PROGRAMS, ids=lambda value: str(value)[:20])
def test_a_program_in_the_documents_runs_and_runs_again(page: str, line: int, text: str, tmp_path: Path):
    """The second start resumes, if the program saves."""
    program = tmp_path / "program.py"
    program.write_text(text)
    for num_ranks in (2, 1):
        torchrun = "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"
        ended = run_python(*torchrun, str(program), folder=tmp_path, PYTHONPATH=str(ROOT))
        assert ended.returncode == 0, ended.stderr
