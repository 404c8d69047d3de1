"""Dry runs and plans print and write what tests/recordings holds: each line and number of it.

The formulas behind the numbers have tests of their own. Here a change of any of them is seen.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gpt.monitor.console import RunConsole
from gpt.settings.parser import parse_settings
from lab.dryrun import report
from lab.dryrun.dry_run import Recording, dry_run
from lab.measure.cluster import ClusterSpec
from lab.planner import depth, plan
from lab.planner.depth import DepthExtrapolation
from lab.planner.layouts import CandidateLayout, candidate_layouts, predict
from lab.planner.plan import extrapolate_layout
from tests.recordings import assert_recorded, lines_of
from tests.unit.lab.dryrun.test_projection import ROOT, shallow

CLUSTERS = ROOT / "configs/clusters"
BF16 = "--train.precision=bf16", "--zero.accumulate_dtype=fp32", "--zero.reduce_dtype=fp32"
OVERLAP = *BF16, "--zero.overlap=true", "--zero.overlap_gather=true", "--zero.bucket_numel=5000"
LLAMA = (
    *("--model.positions=rope", "--model.norm=rms", "--model.mlp=swiglu", "--model.num_kv_heads=2"),
    *("--model.biases=false", "--model.tied_head=false", "--model.attention=flash", "--model.dropout=0"),
)
RUNS = {  # name: (cluster, options)
    "stage-0": ("dgx-2", "--zero.stage=0", "--activations.store=none"),
    "stage-0-overlap": ("dgx-h100", "--zero.stage=0", "--activations.store=keep", *OVERLAP),
    "stage-1-offload": (
        *("dgx-2", "--zero.stage=1", "--offload.mode=host"),
        *("--activations.store=keep", "--model.hidden_size=1024"),
    ),
    "stage-1-overlap": ("dgx-h100", "--zero.stage=1", "--activations.store=selective", *OVERLAP),
    "stage-2-adamw8bit": ("dgx-a100", "--zero.stage=2", "--optimizer.name=adamw8bit", "--activations.store=selective"),
    "stage-2-offload": ("dgx-a100", "--zero.stage=2", "--offload.mode=host", "--activations.store=keep", *OVERLAP),
    "stage-3-muon": (
        *("dgx-h100", "--zero.stage=3", "--optimizer.name=muon"),
        *("--activations.store=keep", "--parallel.tensor_size=1"),
    ),
    "stage-3-overlap": (
        *("dgx-h100", "--zero.stage=3", "--zero.prefetch_numel=20000", "--zero.resident_numel=64"),
        *(*LLAMA, *OVERLAP),
    ),
    "stage-3-offload": (
        *("dgx-h100", "--zero.stage=3", "--offload.mode=auto", "--offload.accelerator_memory_gb=0.0015"),
        *("--offload.hidden_dim=64", "--offload.min_chunk_size_m=0.004", "--offload.search_range_m=0.004"),
        *("--zero.resident_numel=192", "--parallel.tensor_size=1", "--activations.store=keep", *OVERLAP),
    ),
    "partition-host": ("p4d", "--zero.stage=2", "--activations.store=partition_host", "--zero.bucket_numel=5000"),
    "sequence-parallel": (
        *("dgx-h100", "--zero.stage=1", "--parallel.sequence_parallel=true", "--activations.store=none"),
        *(*LLAMA, *BF16),
    ),
    "context": (
        *("dgx-h100", "--zero.stage=2", "--parallel.tensor_size=1", "--parallel.context_size=2"),
        *("--activations.store=none", "--optimizer.name=soap", *LLAMA, *BF16),
    ),
    "two-nodes": (
        *("dgx-2", "--zero.stage=3", "--dry_run.world_size=32", "--train.global_batch_size=64"),
        *("--parallel.shard_size=4", "--zero.accumulate=local"),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_report_of_a_dry_run_is_as_recorded(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.chdir(tmp_path)
    cluster, *options = RUNS[name]
    files = f"--dry_run.cluster={CLUSTERS / cluster}.yaml", "--run.dir=run", "--dry_run.trace=trace.json"
    recordings: list[Recording] = []
    monkeypatch.setattr(report, "dry_run", lambda settings: recordings.append(dry_run(settings)) or recordings[0])
    with caplog.at_level(logging.INFO):
        report.run_and_report(shallow(*files, *options), RunConsole(is_quiet=False))
    logged = [record.getMessage() for record in caplog.records if not record.name.startswith("torch")]
    written, trace = (json.loads(Path(file).read_text()) for file in ("run/report.json", "trace.json"))
    lanes = sums_by_lane(trace["traceEvents"])
    steps = steps_of(recordings[0])
    assert_recorded(f"dry-run-{name}", capsys.readouterr().out, *lines_of(written), *lines_of(lanes), *steps, *logged)


def steps_of(recording: Recording) -> list[str]:
    """Return a line for each collective and copy, at its place among the kernels, and lines for memory and matrices.

    The line of the memory adds up the bytes that are allocated and freed, each times the number of the kernel before.
    """
    changes, matrices = recording.memory.changes, recording.state.optimizer.matrices
    copies = [(place, kernel) for place, kernel in enumerate(recording.kernels) if kernel.is_transfer]
    return [
        *(
            f"{place}: {one.phase}, copy {'to' if one.to_host else 'from'} the host, {one.num_bytes}"
            for place, one in copies
        ),
        f"matrices: {matrices.assignment.all_flops} FLOPs of ranks, {matrices.sent_numels()} sent elements",
        *(f"{one.launched} to {one.awaited}: {one.op}, {one.axis}, {one.message_bytes}" for one in recording.events),
        f"memory: {len(changes)} changes, {sum(time * num_bytes for time, _, num_bytes in changes)}",
    ]


def sums_by_lane(tasks: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the number of tasks of each lane, and the sums of their starts and durations."""
    sums: dict[str, dict[str, float]] = {}
    for task in tasks:
        row = sums.setdefault(task["tid"], {"count": 0, "ts": 0.0, "dur": 0.0})
        row["count"] += 1
        row["ts"] += task["ts"]
        row["dur"] += task["dur"]
    return sums


FORMS = {  # (settings, cluster, number of GPUs)
    "100b": ("paper/figure2/100b-zero-400.yaml", "dgx-2", 400, "--offload.mode=auto"),
    "llama": ("models/llama-3-8b.yaml", "dgx-h100", 64, "--train.global_batch_size=256", "--model.dropout=0"),
    "muon": ("gpt/1.3b.yaml", "dgx-a100", 32, "--optimizer.name=muon", "--train.compile=blocks"),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_closed_forms_of_all_layouts_are_as_recorded(name: str):
    file, cluster_name, num_gpus, *options = FORMS[name]
    settings = parse_settings(["--config", str(ROOT / "configs" / file), *options])
    cluster = ClusterSpec.load(CLUSTERS / f"{cluster_name}.yaml")
    layouts = candidate_layouts(cluster.gpus_per_node, settings.train.global_batch_size, settings.offload.mode)
    found = (predict(layout, settings, cluster, num_gpus) for layout in layouts if layout.micro_batch_size in (1, 8))
    lines = [
        f"{one.layout}: {one.device_bytes:.6g} bytes, on the host {one.host_bytes:.6g}, "
        f"{one.seconds:.6g} s, overlapped {one.overlapped_seconds:.6g} s"
        for one in found
        if one is not None
    ]
    assert_recorded(f"closed-forms-{name}", *lines)


def test_plans_are_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(depth, "DEPTHS", (1, 2))
    estimates: dict[tuple[CandidateLayout, int], DepthExtrapolation] = {}

    def extrapolate_once(layout: CandidateLayout, *others: Any) -> DepthExtrapolation:
        key = layout, others[-1]
        if key not in estimates:
            estimates[key] = extrapolate_layout(layout, *others)
        return estimates[key]

    monkeypatch.setattr(plan, "extrapolate_layout", extrapolate_once)
    monkeypatch.chdir(ROOT)
    small = "--model.hidden_size=512", "--model.num_heads=2", "--model.vocab_size=512", "--model.seq_length=128"
    model = "--config=configs/gpt/1.3b.yaml", *small, "--train.compile=none"
    for kind in ([f"--front={tmp_path / 'front.png'}"], [], ["--largest"]):
        plan.main(["--cluster=configs/clusters/dgx-a100.yaml", "--verify=1", "--nodes=2", *kind, *model])
    printed = capsys.readouterr()
    assert_recorded("plans", printed.err, printed.out.replace(str(tmp_path), "FOLDER"))
