"""The parts of an acceptance run: what each one runs, how its result is read, and what counts as passed.

    preflight                     all ranks: nodes are alike, links and devices are not slow; writes the cluster file
    equality, N ranks             stages x shard groups x tensor x stores x offload equal one process, also delayed
    equality, sanitized           the same on all GPUs under torch's CUDA stream sanitizer
    tests/gpu                     the tests that need a GPU
    step time of a model          beside DDP and FSDP2: time, memory, MFU
    dry run, training             the same settings: peak memory, time of a step; communication with and without overlap

lab/acceptance/long_runs.py has the parts of --long.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lab.acceptance import readings
from lab.acceptance.child import as_options
from lab.acceptance.figures import Figure
from lab.acceptance.plan import ModelSize, Plan


@dataclass(frozen=True)
class Part:
    """One row: a child process, and the function that reads its log and files into figures that are judged."""

    name: str
    command: list[str]
    read: Callable[[Path], list[Figure]]  # gets the log file
    limit_seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    is_long: bool = False

    @property
    def file_name(self) -> str:
        return "-".join("".join(c if c.isalnum() or c == "." else " " for c in self.name.lower()).split())


def parts(plan: Plan) -> list[Part]:
    """Return all parts of a run but those of --long, in the order in which they run."""
    rows = [preflight(plan), *(equality(plan, num_ranks) for num_ranks in plan.world_sizes)]
    if plan.machine.num_gpus:
        rows += [sanitized(plan), gpu_tests(plan)]
    rows += [step_time(plan, size) for size in plan.compared]
    for stage in plan.scale.training_stages:
        rows += [dry_run(plan, stage), training(plan, stage), training_without_overlap(plan, stage)]
    return rows


def preflight(plan: Plan) -> Part:
    words = ["-m", "lab.measure", "--write", str(plan.cluster_file), "--name", plan.machine.slug]
    return Part("preflight", plan.launch(plan.num_ranks, *words), partial(readings.preflight, plan), 180)


def equality(plan: Plan, num_ranks: int, *words: str, name: str = "", **environment: str) -> Part:
    name = name or f"equality, {num_ranks} rank{'s' * (num_ranks > 1)}"
    file = plan.output / f"{name.replace(', ', '-').replace(' ', '-')}.jsonl"
    command = plan.launch(num_ranks, "-m", "lab.acceptance.equality", "--output", str(file), *words)
    if plan.scale.num_cases is not None:
        command += ["--cases", str(plan.scale.num_cases)]
    return Part(name, command, partial(readings.equality, file), 300, environment)


def sanitized(plan: Plan) -> Part:
    # The sanitizer looks at every operation from Python, which compiled code does not pass through.
    switches = {"TORCH_CUDA_SANITIZER": "1", "TORCHDYNAMO_DISABLE": "1"}
    return equality(plan, plan.num_ranks, "--without_delays", name="equality, sanitized", **switches)


def gpu_tests(plan: Plan) -> Part:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "0", "tests/gpu"]
    return Part("tests/gpu", command, readings.tests, 300)


def step_time(plan: Plan, size: ModelSize) -> Part:
    scale, part = plan.scale, f"step time of {size.name}"
    contenders = ["ddp-fused", "fsdp2", "zero-1", "zero-2", "zero-3"]
    file = plan.output / f"step-time-{size.millions}m.json"
    options = {
        "model": "gpt",
        "precision": "bf16" if plan.half_precision == "bf16" else "fp32",
        "contenders": f"[{','.join(contenders)}]",
        "rounds": scale.rounds,
        "steps": scale.bench_steps,
        "warmup": scale.warmup,
        "layers": size.layers,
        "hidden": size.hidden,
        "vocab": scale.vocab,
        "seq": scale.seq,
        "micro_batch_size": scale.micro_batch_size,
        "json": file,
    }
    command = plan.launch(plan.num_ranks, "-m", "lab.bench.step_time", *as_options(options))
    return Part(part, command, partial(readings.step_time, plan, size, file), 240)


def dry_run(plan: Plan, stage: int) -> Part:
    folder = plan.output / f"dry-run-stage-{stage}"
    options = training_options(plan, stage, folder) | {
        "dry_run.world_size": plan.num_ranks,
        "dry_run.cluster": plan.cluster_file,
        "dry_run.backend": "nccl" if plan.machine.num_gpus else "gloo",
    }
    command = [sys.executable, "pretrain_gpt.py", *as_options(options)]
    return Part(f"dry run, stage {stage}", command, partial(readings.dry_run, folder), 120)


def training(plan: Plan, stage: int) -> Part:
    folder = plan.output / f"training-stage-{stage}"
    command = plan.launch(plan.num_ranks, "pretrain_gpt.py", *as_options(training_options(plan, stage, folder)))
    read = partial(readings.training, plan, folder, plan.output / f"dry-run-stage-{stage}")
    return Part(f"training, stage {stage}", command, read, 240)


def training_without_overlap(plan: Plan, stage: int) -> Part:
    folder = plan.output / f"training-stage-{stage}-without-overlap"
    options = training_options(plan, stage, folder)
    options |= {"zero.overlap": "false", "zero.overlap_gather": "false", "zero.prefetch_numel": 0}
    command = plan.launch(plan.num_ranks, "pretrain_gpt.py", *as_options(options))
    read = partial(readings.hidden_share, plan, plan.output / f"training-stage-{stage}", folder)
    return Part(f"training, stage {stage}, without overlap", command, read, 240)


def training_options(plan: Plan, stage: int, folder: Path) -> dict[str, object]:
    scale = plan.scale
    return {
        "config": Path(__file__).with_name("training.yaml"),
        **scale.trained.options(scale.seq),
        "model.vocab_size": scale.vocab,
        "data.path": plan.synthetic_data,
        "zero.stage": stage,
        "train.precision": plan.half_precision,
        "train.steps": scale.training_steps,
        "train.micro_batch_size": scale.micro_batch_size,
        "train.global_batch_size": scale.micro_batch_size * plan.num_ranks,
        "train.log_every": scale.log_every,
        "profile.steps": scale.profiled,
        "run.dir": folder,
    }
