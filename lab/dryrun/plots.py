"""Plots of a projected step: its memory by kind of tensor, and its lanes."""

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.dryrun.dry_run import Recording
from lab.dryrun.projection import Timeline
from lab.pages.plots import BESIDE, plot
from parallel.memory_kinds import TensorKind

NUM_MOMENTS = 2000  # in a plot of memory; more would not be seen
COLORS = {kind: f"C{number}" for number, kind in enumerate(TensorKind)}
NUM_INTERVALS = 450  # in a plot of lanes, two pixels each
LANE_COLORS = {"compute": "C0", "host": "C2"}  # other lanes communicate


def plot_memory(recording: Recording, path: Path, timeline: Timeline | None) -> None:
    """Plot the device's memory over a step, stacked by kind of tensor, with the limit of the timeline's cluster.

    Without a timeline, there is no limit, and the axis counts kernels instead of seconds.
    """
    times = kernel_starts(recording, timeline) if timeline else list(range(len(recording.kernels) + 1))
    moments = highest_moments(recording)
    kinds = [kind for kind in TensorKind if any(state[kind] for _, state in moments)]
    limit = timeline.cluster.usable_gpu_bytes / 1e9 if timeline else 0.0
    is_near = max(state.total() for _, state in moments) / 1e9 > limit / 3
    with plot(path) as (axes,):
        axes.stackplot(
            [times[position] * (1e3 if timeline else 1) for position, _ in moments],
            [[state[kind] / 1e9 for _, state in moments] for kind in kinds],
            labels=kinds,
            colors=[COLORS[kind] for kind in kinds],
            step="post",
        )
        if limit and is_near:
            axes.axhline(limit, color="black", linestyle="--", label=f"limit, {limit:.1f} GB")
        axes.set(
            title="Memory of one device over a step" + ("" if is_near else f", limit {limit:.1f} GB"),
            xlabel=f"projected time, ms{timeline.cluster.remark}" if timeline else "kernels launched",
            ylabel="GB",
        )
        axes.margins(x=0)
        axes.legend(**BESIDE)


def highest_moments(recording: Recording) -> list[tuple[int, Counter[TensorKind]]]:
    """Return (kernels launched, bytes by kind) at the highest total of each of about NUM_MOMENTS equal intervals."""
    width = max(1, -(-(len(recording.kernels) + 1) // NUM_MOMENTS))
    moments: dict[int, tuple[int, Counter[TensorKind]]] = {}
    for position, state in recording.memory.states():
        interval = position // width
        if interval not in moments or state.total() > moments[interval][1].total():
            moments[interval] = position, state.copy()
    return [*(moments[interval] for interval in sorted(moments)), (len(recording.kernels), state)]


def kernel_starts(recording: Recording, timeline: Timeline) -> list[float]:
    """Return the time at which each kernel of the computation starts, and the end of the step.

    A copy, and an update on the host, is given the time at which the computation goes on.
    """
    computing = [task.start for task in timeline.tasks if task.lane == "compute"]
    starts = [timeline.shown_seconds]
    for kernel in reversed(recording.kernels):
        starts.append(starts[-1] if kernel.is_transfer or kernel.is_on_host else computing.pop())
    return starts[::-1]


def plot_lanes(timeline: Timeline, path: Path) -> None:
    """Plot how busy each lane of a projected step is: the computation, each axis, copies, and updates on the host.

    The height of a lane is the fraction of each of NUM_INTERVALS equal times in which one of its tasks runs.
    """
    busy, seconds = timeline.busy_seconds(of_tasks=True), timeline.shown_seconds
    lanes = list(busy)[::-1]  # the first one is drawn at the top
    edges = np.linspace(0, seconds, NUM_INTERVALS + 1)
    with plot(path, size=(9, 0.8 + 0.6 * len(lanes))) as (axes,):
        for row, lane in enumerate(lanes):
            shares = busy_shares(timeline, lane, edges)
            axes.stairs(row + 0.8 * shares, edges * 1e3, baseline=row, fill=True, color=LANE_COLORS.get(lane, "C1"))
        axes.set(
            title="Lanes of a projected step",
            xlabel=f"projected time, ms{timeline.cluster.remark}",
            yticks=[row + 0.4 for row in range(len(lanes))],
            yticklabels=[f"{lane}, {100 * busy[lane] / seconds:.0f}% busy" for lane in lanes],
            xlim=(0, seconds * 1e3),
        )


def busy_shares(timeline: Timeline, lane: str, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the fraction of each interval between `edges`, in seconds, in which a task of the lane runs."""
    spans = np.array([(task.start, task.end) for task in timeline.tasks if task.lane == lane])
    busy_until = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])
    points = np.stack([busy_until[:-1], busy_until[1:]], axis=1)  # at the start and the end of each task
    return np.diff(np.interp(edges, spans.ravel(), points.ravel())) / np.diff(edges)
