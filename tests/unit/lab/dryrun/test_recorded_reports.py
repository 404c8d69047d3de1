"""Two dry runs print and write what tests/recordings holds: each line and number of it.

The formulas behind the numbers have tests of their own. Here a change of any of them is seen.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gpt.monitor.console import RunConsole
from lab.dryrun import report
from lab.dryrun.dry_run import Recording, dry_run
from tests.recordings import assert_recorded, lines_of
from tests.unit.lab.dryrun.test_projection import ROOT, shallow
from zero.updates.matrix_update import MatrixUpdate

RUNS = {  # name: (cluster, options)
    "stage-1-offload": (
        *("dgx-2", "--zero.stage=1", "--offload.mode=host"),
        *("--activations.store=keep", "--model.hidden_size=1024"),
    ),
    "stage-3-muon": (
        *("dgx-h100", "--zero.stage=3", "--optimizer.name=muon"),
        *("--activations.store=keep", "--parallel.tensor_size=1"),
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
    files = (
        f"--dry_run.cluster={ROOT / 'configs/clusters' / cluster}.yaml",
        "--run.dir=run",
        "--dry_run.trace=trace.json",
    )
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
    changes, updates = recording.memory.changes, recording.state.optimizer.updates
    work = [
        f"matrices: {update.assignment.all_flops} FLOPs of ranks, {update.sent_numels()} sent elements"
        for update in updates
        if isinstance(update, MatrixUpdate)
    ]
    copies = [(place, kernel) for place, kernel in enumerate(recording.kernels) if kernel.is_transfer]
    return [
        *(
            f"{place}: {one.phase}, copy {'to' if one.to_host else 'from'} the host, {one.num_bytes}"
            for place, one in copies
        ),
        *work,
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
