"""The parts of an acceptance run: what each one runs, how its result is read, and what counts as passed.

    preflight                     all ranks: nodes are alike, links and devices are not slow; writes the cluster file
    equality, N ranks             stages x shard groups x tensor x stores x offload equal one process, also delayed
    equality, sanitized           the last of them again under torch's CUDA stream sanitizer
    tests/gpu                     the tests that need a GPU
    step time of a model          beside DDP and FSDP2: time, memory, MFU
    dry run, training             the same settings: peak memory, time of a step; communication with and without overlap

lab/acceptance/long_runs.py has the parts of --long.
"""

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpt.run_folder.files import read_steps
from lab.acceptance.child import as_options
from lab.acceptance.equality import TOLERANCE
from lab.acceptance.figures import Figure, UnreadableResult, at_most, between
from lab.acceptance.plan import ModelSize, Plan
from lab.measure.cluster import ClusterSpec

TIME_LIMIT = 1.1  # stages 1 and 2 beside DDP, stage 3 beside FSDP2
MEMORY_LIMITS = (0.8, 1.1)  # measured peak beside the dry run's, which leaves out workspaces and the allocator's gaps
PROJECTION_LIMITS = (0.67, 1.5)  # measured time of a step beside the projected one
HIDDEN_LIMITS = (0.5, 1.0)  # of the time that ranks wait for communication without overlap


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
    return Part("preflight", plan.launch(plan.num_ranks, *words), partial(_read_preflight, plan), 180)


def _read_preflight(plan: Plan, log: Path) -> list[Figure]:
    """Read the cluster file, and what the report says about slow links and devices."""
    cluster = ClusterSpec.load(plan.cluster_file)
    slow = [line for line in log.read_text().splitlines() if line.startswith("slow ")]
    verdict = "; ".join(slow) or "nothing is slow"
    required = "nothing is slow" if plan.is_judged else ""
    return [
        Figure("links and devices", verdict, required=required, passed=not slow or not plan.is_judged),
        Figure("all-reduce inside the node, a rank", cluster.intra_node_gb_per_second, "GB/s"),
        Figure("product in half precision", cluster.peak_half_tflops, "TFLOP/s"),
        Figure("memory bandwidth", cluster.memory_gb_per_second, "GB/s"),
        Figure("copy to the host", cluster.host_gb_per_second, "GB/s"),
    ]


def equality(plan: Plan, num_ranks: int, *words: str, name: str = "", **environment: str) -> Part:
    name = name or f"equality, {num_ranks} rank{'s' * (num_ranks > 1)}"
    file = plan.output / f"{name.replace(', ', '-').replace(' ', '-')}.jsonl"
    command = plan.launch(num_ranks, "-m", "lab.acceptance.equality", "--output", str(file), *words)
    if plan.scale.num_cases is not None:
        command += ["--cases", str(plan.scale.num_cases)]
    return Part(name, command, partial(_read_equality, file), 300, environment)


def sanitized(plan: Plan) -> Part:
    # The sanitizer looks at every operation from Python, which compiled code does not pass through.
    switches = {"TORCH_CUDA_SANITIZER": "1", "TORCHDYNAMO_DISABLE": "1"}
    return equality(plan, plan.world_sizes[-1], "--without_delays", name="equality, sanitized", **switches)


def _read_equality(file: Path, log: Path) -> list[Figure]:
    """Read the comparisons with one process: all must be equal, and there must be some."""
    if not file.exists():
        raise UnreadableResult(f"{file} does not exist: nothing was compared")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    figures = []
    for is_delayed, how in ((False, ""), (True, ", delayed")):
        found = [row for row in rows if row["is_delayed"] is is_delayed]
        if found:
            wrong = [row["what"] for row in found if not row["passed"]]
            equal = f"{len(found) - len(wrong)} of {len(found)}" + (f"; not: {'; '.join(wrong)}" if wrong else "")
            figures.append(Figure(f"equal comparisons{how}", equal, required="all", passed=not wrong))
            largest = max(row["difference"] for row in found)
            figures.append(at_most(f"largest relative difference{how}", largest, TOLERANCE))
    return figures


def gpu_tests(plan: Plan) -> Part:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "0", "tests/gpu"]
    return Part("tests/gpu", command, _read_tests, 300)


def _read_tests(log: Path) -> list[Figure]:
    """Read the summary of pytest: some tests must have run."""
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", log.read_text())}
    num_passed = counts.get("passed", 0)
    text = ", ".join(f"{count} {word}" for word, count in counts.items()) or "no summary"
    is_fine = num_passed > 0 and not counts.keys() & {"failed", "error"}
    return [Figure("tests", text, required="some passed, none failed", passed=is_fine)]


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
    return Part(part, command, partial(_read_step_time, plan, size, file), 240)


def _read_step_time(plan: Plan, size: ModelSize, file: Path, log: Path) -> list[Figure]:
    result = _load(file)
    flops, (peak, source) = plan.flops_per_device(size, result["settings"]["micro_batch_size"]), plan.peak
    rows = {row["name"]: row for row in result["rows"]}
    figures = [Figure(f"peak for MFU, {source}", peak / 1e12, "TFLOP/s")]
    for name, row in rows.items():
        seconds = row["milliseconds"] / 1e3
        figures.append(Figure(f"{name}: step", row["milliseconds"], "ms"))
        figures.append(Figure(f"{name}: peak memory", row["memory_mib"], "MiB"))
        figures.append(Figure(f"{name}: MFU", 100 * flops / seconds / peak, "%"))
    for name, rival in (("zero-1", "ddp-fused"), ("zero-2", "ddp-fused"), ("zero-3", "fsdp2")):
        ratio = rows[name]["milliseconds"] / rows[rival]["milliseconds"]
        figures.append(at_most(f"{name}: time, x {rival}", ratio, TIME_LIMIT, is_judged=plan.is_judged))
    return figures


def dry_run(plan: Plan, stage: int) -> Part:
    folder = plan.output / f"dry-run-stage-{stage}"
    options = training_options(plan, stage, folder) | {
        "dry_run.world_size": plan.num_ranks,
        "dry_run.cluster": plan.cluster_file,
        "dry_run.backend": "nccl" if plan.machine.num_gpus else "gloo",
    }
    command = [sys.executable, "pretrain_gpt.py", *as_options(options)]
    return Part(f"dry run, stage {stage}", command, partial(_read_dry_run, folder), 120)


def _read_dry_run(folder: Path, log: Path) -> list[Figure]:
    report = _load(folder / "report.json")
    return [
        Figure("projected step", 1e3 * report["step"]["seconds"], "ms"),
        Figure("peak memory of the device", _dry_peak(report) / 1e6, "MB"),
    ]


def training(plan: Plan, stage: int) -> Part:
    folder = plan.output / f"training-stage-{stage}"
    command = plan.launch(plan.num_ranks, "pretrain_gpt.py", *as_options(training_options(plan, stage, folder)))
    read = partial(_read_training, plan, folder, plan.output / f"dry-run-stage-{stage}")
    return Part(f"training, stage {stage}", command, read, 240)


def _read_training(plan: Plan, folder: Path, dry_folder: Path, log: Path) -> list[Figure]:
    """Read a training run, and compare its memory and its time with those of the dry run."""
    records = read_steps(folder)
    scale, report = plan.scale, _load(dry_folder / "report.json")
    settled = [r for r in records if scale.log_every < r["step"] < scale.profiled[0]]
    if not settled:
        raise UnreadableResult(f"{folder} has no metrics of the steps before {scale.profiled[0]}")
    tokens_per_second = statistics.median(record["tokens_per_second"] for record in settled)
    num_sequences = scale.micro_batch_size
    seconds = num_sequences * plan.num_ranks * scale.seq / tokens_per_second
    measured = max(record["peak_allocated_bytes"] for record in records)
    peak, _ = plan.peak
    projected = report["step"]["seconds"]
    is_judged = plan.is_judged
    memory_kind = "peak memory" if is_judged else "peak memory of the whole process"
    first, last = records[0]["loss"], records[-1]["loss"]
    mfu = plan.flops_per_device(scale.trained, num_sequences) / seconds / peak
    return [
        Figure("loss, first and last step", f"{first:.3f} -> {last:.3f}", required="falls", passed=last < first),
        Figure("speed", tokens_per_second, "tokens/s"),
        Figure("MFU", 100 * mfu, "%"),
        Figure(memory_kind, measured / 1e6, "MB"),
        between("peak memory, x dry run", measured / _dry_peak(report), MEMORY_LIMITS, is_judged=is_judged),
        Figure("step", 1e3 * seconds, "ms"),
        between("step, x projection", seconds / projected, PROJECTION_LIMITS, is_judged=is_judged),
    ]


def training_without_overlap(plan: Plan, stage: int) -> Part:
    folder = plan.output / f"training-stage-{stage}-without-overlap"
    options = training_options(plan, stage, folder)
    options |= {"zero.overlap": "false", "zero.overlap_gather": "false", "zero.prefetch_numel": 0}
    command = plan.launch(plan.num_ranks, "pretrain_gpt.py", *as_options(options))
    read = partial(_read_hidden_share, plan, plan.output / f"training-stage-{stage}", folder)
    return Part(f"training, stage {stage}, without overlap", command, read, 240)


def _read_hidden_share(plan: Plan, overlapped: Path, alone: Path, log: Path) -> list[Figure]:
    """Compare the time that ranks wait for collectives with overlap to that without."""
    with_overlap, without = _timers(overlapped), _timers(alone)
    waiting, exposed = (timers["reduce"] + timers["gather"] for timers in (with_overlap, without))
    figures = [
        Figure("step, profiled", 1e3 * without["step"], "ms"),
        Figure("step, profiled, with overlap", 1e3 * with_overlap["step"], "ms"),
        Figure("waiting for collectives", 1e3 * exposed, "ms"),
        Figure("waiting for collectives, with overlap", 1e3 * waiting, "ms"),
    ]
    if plan.num_ranks == 1 or not exposed:
        return [*figures, Figure("share of communication that is hidden", "there is none")]
    share, is_judged = 1 - waiting / exposed, plan.is_judged
    return [*figures, between("share of communication that is hidden", share, HIDDEN_LIMITS, is_judged=is_judged)]


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


def _dry_peak(report: dict[str, Any]) -> int:
    """Return the peak of the device's memory in the dry run, in a step or while the model is built."""
    return max(sum(report["peak_bytes"]["device"].values()), report["building_peak_bytes"])


def _timers(folder: Path) -> dict[str, float]:
    """Return the timers of a profiled run, in seconds a step: means over ranks."""
    sums: defaultdict[str, float] = defaultdict(float)
    by_rank = _load(folder / "profile" / "timers.json")
    for timers in by_rank:
        for name, seconds in timers.items():
            sums[name] += seconds / len(by_rank)
    return sums


def _load(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise UnreadableResult(f"{file} cannot be read ({error.strerror}): the part that writes it failed") from error
