"""The front of a plan: the layouts, on one or several numbers of nodes, that no other beats; a table and a plot."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from rich.table import Column, Table

from gpt.monitor.units import duration
from lab.dryrun.collectives import right_aligned
from lab.dryrun.run_cost import RunCost
from lab.measure.cluster import ClusterSpec
from lab.pages.plots import BESIDE, plot
from lab.planner.depth import Estimate
from lab.planner.layouts import CandidateLayout, Prediction
from lab.planner.search import Search

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """A layout of one of the searches, each on a number of nodes, which fits in a dry run."""

    search: Search
    layout: CandidateLayout
    estimate: Estimate

    @cached_property
    def cost(self) -> RunCost:
        return self.search.cost(self.estimate)

    @property
    def memory_gb(self) -> float:
        return self.estimate.device_peak_bytes / 1e9

    @property
    def days(self) -> float:
        return self.cost.seconds / 86400

    @property
    def figures(self) -> tuple[float, float, float]:
        """Time and GPU hours of the run, to three digits, and the memory of a GPU in GB: all are to be small."""
        seconds, gpu_hours = (float(f"{figure:.3g}") for figure in (self.cost.seconds, self.cost.gpu_hours))
        return seconds, gpu_hours, round(self.memory_gb, 1)


def front(items: Iterable[T], figures: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Return the items that no other beats: one that is as small in each figure and smaller in one.

    They are in the order of their figures. Of items whose figures are equal, the first is returned.
    """
    found: list[T] = []
    # In this order, no item is beaten by a later one.
    for item in sorted(items, key=figures):
        own = figures(item)
        if not any(all(a <= b for a, b in zip(figures(one), own, strict=True)) for one in found):
            found.append(item)
    return found


def spread(predictions: Iterable[Prediction], most: int) -> list[CandidateLayout]:
    """Return up to `most` layouts of the front of closed forms, from the fastest to the one with the least memory."""
    found = front(predictions, lambda one: (float(f"{one.seconds:.3g}"), one.device_bytes))
    last = len(found) - 1
    chosen = {round(number * last / max(1, most - 1)) for number in range(most)} if found else set()
    return [found[number].layout for number in sorted(chosen)]


def front_table(choices: Sequence[Choice], cluster: ClusterSpec) -> Table:
    """Return a table of the choices: the time, GPU hours and price of their runs, and their memory."""
    title = f"Front: no other layout is as good in time, cost and memory{cluster.remark}"
    figures = "GB", "run", "GPU\nhours", *(["dollars"] if cluster.dollars_per_gpu_hour else [])
    columns = Column("nodes", justify="right"), Column("layout", max_width=24), *right_aligned(*figures)
    table = Table(*columns, title=title, title_justify="left")
    for one in choices:
        dollars = [f"{one.cost.dollars:,.0f}"] if one.cost.dollars is not None else []
        figures = f"{one.memory_gb:.1f}", duration(one.cost.seconds), f"{one.cost.gpu_hours:,.0f}", *dollars
        table.add_row(str(one.search.num_nodes), str(one.layout), *figures)
    return table


def plot_front(choices: Sequence[Choice], chosen: Sequence[Choice], path: Path, cluster: ClusterSpec) -> None:
    """Plot the time of a run over the memory of a GPU, a color for each number of nodes; those chosen are a line."""
    with plot(path) as (axes,):
        for num_nodes in sorted({one.search.num_nodes for one in choices}):
            points = [(one.memory_gb, one.days) for one in choices if one.search.num_nodes == num_nodes]
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
        axes.legend(**BESIDE)
