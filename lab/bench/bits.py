"""A record of what the program computes, to the bit, to compare before and after a change that may change nothing.

    python -m lab.bench.bits before.json
    python -m lab.bench.bits after.json --only 'stage3*'
    python -m lab.bench.bits --compare before.json after.json         exits with 1 if a run differs

Every run is a command line of a user, in runs/bits: training on two ranks of one thread each, the export of a
checkpoint, and dry runs. Recorded is what they log, less times and the memory of processes; numbers stay the text that
the program wrote. Records of two machines, or of two versions of torch, may differ in the last digits.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

ROOT, FOLDER = Path(__file__).resolve().parents[2], Path("runs/bits")
TEXT, DATA = Path(sysconfig.get_paths()["stdlib"], "email"), FOLDER / "data/text"
PREPARE, EXPORT, TRAIN = "-m data.prepare", "-m gpt.checkpoint.export", "pretrain_gpt.py"
TWO_RANKS = "-m torch.distributed.run --standalone --nproc_per_node=2"
# The quickstart's model, with shorter sequences and a smaller vocabulary and batch: some seconds a run.
SMALL = """--config=configs/quickstart.yaml --model.vocab_size=2048 --model.seq_length=64 --data.split=[0.8,0.1,0.1]
    --train.micro_batch_size=2 --train.global_batch_size=8 --train.steps=20 --train.log_every=1 --train.eval_every=10
    --train.eval_samples=16 --train.sample_tokens=8 --schedule.warmup_steps=5 --checkpoint.every=0"""
HALF, LLAMA = "--train.precision=bf16", "--config=configs/models/llama.yaml --model.num_kv_heads=2 --zero.stage=3"
STAGES = {
    f"stage{stage}-tensor{size}-{precision}":
    f"--zero.stage={stage} --parallel.tensor_size={size} --train.precision={precision}"
    for stage in range(4) for size in (1, 2) for precision in ("fp32", "bf16")
}  # fmt: skip
OTHERS = {
    "llama-muon": f"{LLAMA} --optimizer.name=muon",
    "llama-soap": f"{LLAMA} --optimizer.name=soap {HALF}",
    "adamw8bit": f"--optimizer.name=adamw8bit --zero.accumulate=local {HALF}",
    "host": f"--zero.stage=3 --offload.mode=host --activations.store=keep {HALF}",
    "gemini": "--zero.stage=3 --offload.mode=auto --offload.accelerator_memory_gb=0.017 "
    "--offload.min_chunk_size_m=0.25 --offload.search_range_m=0.25 --offload.hidden_dim=192",
    "partition-host": "--parallel.tensor_size=2 --parallel.sequence_parallel=true "
    "--activations.store=partition_host --model.dropout=0.1 --train.precision=fp16",
    "context": "--parallel.context_size=2 --activations.store=selective --zero.stage=1",
    "documents": "--data.mask_documents=true --data.packing=best_fit --parallel.shard_size=1",
}
DRY_RUNS = {  # file in configs: ranks, file in configs/clusters, further options; all with four layers
    "paper/figure2/60b-baseline-384": "384 dgx-2",
    "paper/figure2/100b-zero-400": "400 dgx-2",
    "paper/figure4/13b-zero-128": "128 dgx-2",
    "paper/figure7/40b-c1-400": "400 dgx-2",
    "paper/figure8/60b-c5-128": "128 dgx-2",
    "paper/1t-data1024": "1024 dgx-2",
    "published/llm.c-12x768-n8-s1024-b64": "8 dgx-a100",
    "published/PyTorch_FSDP-96x12288-n256-s2048-b1": "256 dgx-a100-40gb",
    "published/MosaicML_H100-24x2048-n64-s2048-b20": "64 dgx-h100",
    "published/DeepSpeed_Azure-128x25600-n1024-s1024-b8": "1024 dgx-a100",
    "published/Megatron_v1.1_V100-36x3072-n4-s1024-b8": "4 dgx-2-nccl",
    "gpt/70b": "512 dgx-h100",
    "gpt/13b": "64 dgx-a100 --zero.stage=3 --offload.mode=host --dry_run.backend=gloo",
    "gpt/6.7b": "8 p4d --zero.stage=3 --offload.mode=auto --offload.accelerator_memory_gb=12 --train.compile=none",
    "gpt/1.3b": "16 dgx-h100 --zero.stage=2 --optimizer.name=muon --train.compile=none",
}
SAVED, STEP = ("stage3-tensor1-bf16", "llama-muon"), "step-00000010"  # runs that resume from that checkpoint
exact = partial(json.loads, parse_float=str)  # numbers as they are written
VARIES = re.compile(r"per_second|tflops|mfu|peak_|^reserved")  # measured values, by their names in metrics.jsonl


def run(*words: str | Path) -> list[str]:
    """Run Python with these words, each a text of several options or a path, and return the lines that it prints."""
    command = [sys.executable, *(part for word in words for part in str(word).split())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout.splitlines()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def train(name: str, options: str) -> dict[str, Any]:
    """Return the logged steps of a run, and the collectives of one step."""
    shutil.rmtree(ROOT / FOLDER / name, ignore_errors=True)
    run(TWO_RANKS, TRAIN, SMALL, options, f"--data.path={DATA} --run.dir={FOLDER / name}")
    lines = map(exact, (ROOT / FOLDER / name / "metrics.jsonl").read_text().splitlines())
    profile = ROOT / FOLDER / name / "collectives.json"
    steps = {str(line["step"]): {key: line[key] for key in line if not VARIES.search(key)} for line in lines}
    return {"steps": steps, "profile": exact(profile.read_text()) if profile.exists() else None}


def train_and_resume(name: str, options: str, kept: Path | None) -> dict[str, Any]:
    """Return also hashes of what the run saves and of its exported weights, and where a resumed run differs from it."""
    found, saved = train(name, f"{options} --checkpoint.every=10"), FOLDER / name / "checkpoints" / STEP
    found["saved"] = dict(map(saved_file, sorted((ROOT / saved).iterdir())))
    saved = kept / name / STEP if kept else saved
    exported = ROOT / FOLDER / name / "exported"
    run(EXPORT, saved, "--output", exported)
    found["exported"] = {path.name: digest(path.read_bytes()) for path in sorted(exported.iterdir())}
    resumed = train(f"{name}-resumed", f"{options} --checkpoint.resume={saved}")["steps"]
    later = {step: found["steps"][step] for step in resumed}
    return found | {"resumed": {"steps": len(resumed), "differences": differences(later, resumed)}}


def saved_file(path: Path) -> tuple[str, Any]:
    """Return a file's name, and what does not depend on the random name of the run: its layout, or its tensors."""
    content = path.read_bytes()
    if path.suffix == ".json":
        layout = exact(content.decode())
        del layout["crc32"], layout["files"], layout["progress"]["run"]
        return path.name, {key: digest(json.dumps(value).encode()) for key, value in layout.items()}
    end = 8 + int.from_bytes(content[:8], "little")  # of the header, whose metadata has the name of the run
    tensors = {name: place for name, place in json.loads(content[8:end]).items() if name != "__metadata__"}
    return path.name, {"tensors": digest(json.dumps(tensors).encode()), "data": digest(content[end:])}


def dry_run(name: str, words: str) -> dict[str, Any]:
    """Return the lines that a dry run prints, and its report."""
    (num_ranks, cluster, *options), folder = words.split(), FOLDER / "dry" / name
    imitated = f"--dry_run.world_size={num_ranks} --dry_run.cluster=configs/clusters/{cluster}.yaml"
    model = f"--config=configs/{name}.yaml --model.num_layers=4"
    printed = run(TRAIN, model, imitated, *options, f"--data.path={DATA} --run.dir={folder}")
    return {"printed": printed, "report": exact((ROOT / folder / "report.json").read_text())}


def record(only: str, kept: Path | None) -> Iterator[tuple[str, Any]]:
    """Yield (name, record) of the versions, the data and each run whose name matches `only`."""
    yield "versions", [sys.version, *(importlib.metadata.version(name) for name in ("torch", "tokenizers"))]
    shutil.rmtree(ROOT / DATA.parent, ignore_errors=True)
    run(PREPARE, f"--source {TEXT} --output {DATA} --train_vocab_size 2048 --workers 1")
    yield "data", {suffix: digest((ROOT / f"{DATA}{suffix}").read_bytes()) for suffix in (".bin", ".idx")}
    for name, options in (STAGES | OTHERS | DRY_RUNS).items():
        start = time.perf_counter()
        if not fnmatch(name, only):
            continue
        if name in SAVED:
            yield name, train_and_resume(name, options, kept)
        else:
            yield name, dry_run(name, options) if name in DRY_RUNS else train(name, options)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of everything in a tree of JSON that is neither a dictionary nor a list."""
    if not isinstance(value, dict | list):
        yield name, value
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(part, f"{name}/{key}")


def differences(before: Any, after: Any) -> list[str]:
    """Return a line for each value that differs or is in one tree only."""
    old, new = dict(leaves(before)), dict(leaves(after))
    pairs = {name: (old.get(name, "nothing"), new.get(name, "nothing")) for name in old | new}
    return [f"{name}: {one} -> {other}" for name, (one, other) in pairs.items() if one != other]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.bits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", type=Path, nargs="+", help="file to write, or two to compare")
    parser.add_argument("--compare", action="store_true", help="compare two files")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="runs to start or to compare, such as 'stage3*'")
    parser.add_argument("--kept", type=Path, help="folder with RUN/STEP, checkpoints to export and resume instead")
    options = parser.parse_args(arguments)
    if not options.compare:
        found: dict[str, Any] = {}
        for name, value in record(options.only, options.kept and options.kept.resolve()):
            found[name] = value
            options.files[0].write_text(json.dumps(found, indent=1) + "\n")
        return
    before, after = (
        {name: value for name, value in exact(path.read_text()).items() if fnmatch(name, options.only)}
        for path in options.files
    )
    lines = differences(before, after)
    print("\n".join(lines) or f"{len(before)} records are equal")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
