"""A plot of the layouts that fit."""

from collections.abc import Sequence
from pathlib import Path

from lab.dryrun.plots import pyplot, save
from lab.measure.cluster import ClusterSpec
from lab.planner.front import Choice


def plot_front(choices: Sequence[Choice], chosen: Sequence[Choice], path: Path, cluster: ClusterSpec) -> None:
    """Plot the time of a run over the memory of a GPU, a color for each number of nodes; those chosen are a line."""
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for num_nodes in sorted({one.num_nodes for one in choices}):
        points = [(one.memory_gb, one.days) for one in choices if one.num_nodes == num_nodes]
        axes.scatter(*zip(*points, strict=True), label=f"{num_nodes} nodes", alpha=0.6)
    for one in chosen:
        axes.scatter(one.memory_gb, one.days, s=90, facecolors="none", edgecolors="black")
        note = f"{one.cost.gpu_hours:,.0f} GPU h" if one.cost.dollars is None else f"${one.cost.dollars:,.0f}"
        axes.annotate(note, (one.memory_gb, one.days), textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.axvline(cluster.usable_gpu_bytes / 1e9, color="black", linestyle="--", label=f"limit of {cluster.name}")
    axes.set(
        title="Layouts that fit; circles: none is as good in time, cost and memory",
        xlabel="peak memory of a GPU, GB",
        ylabel=f"days of the whole run{cluster.remark}",
    )
    save(figure, axes, path)
