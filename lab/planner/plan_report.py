"""The tables, lines and the plot that the planner shows, and its front: the layouts that no other beats."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Column, Table

from gpt.monitor.units import duration
from gpt.settings.run import CheckpointSettings
from gpt.settings.settings import Settings
from lab.dryrun.collectives import right_aligned
from lab.dryrun.report import budget_line
from lab.dryrun.run_cost import RunCost
from lab.measure.cluster import ClusterSpec
from lab.pages.plots import BESIDE, plot
from lab.planner.depth import Estimate
from lab.planner.layouts import FIELDS, CandidateLayout, Prediction, value_of
from lab.planner.nearest import nearest_lines
from lab.planner.remedies import Remedy
from lab.planner.search import Search
from parallel.validation.fields import shown

NUM_SHOWN = 6  # layouts of closed forms
MAX_REMEDIES = 3  # in a line
T = TypeVar("T")


def constraint_lines(settings: Settings, fixed: Mapping[str, str]) -> Iterator[str]:
    """Yield lines that say which settings of the layout are kept, {name: where they are given}, and which searched."""
    for name, origin in fixed.items():
        yield f"fixed: {name}={shown(value_of(settings, name))} ({origin}; --free {name} searches it)"
    searched = [name for name in FIELDS if name not in fixed]
    if "offload.mode" in searched and settings.offload.mode != "auto":
        searched.remove("offload.mode")
        yield f"fixed: offload.mode={settings.offload.mode} (default; auto searches it)"
    yield f"searched: {', '.join(searched) or 'nothing'}"
    if line := budget_line(settings):
        yield line


def verified_table(verified: Mapping[CandidateLayout, Estimate], search: Search) -> Table:
    """Return a table of the layouts that dry runs have estimated, the fastest first; what does not fit is last."""
    fitting = search.fitting(verified)
    best, tied = search.choose(fitting) if fitting else (None, [])
    columns = Column("layout", max_width=30), *right_aligned("micro-\nbatches", "GB", "seconds", "MFU"), Column("")
    title = f"Layouts by the time of a step, by dry runs{search.cluster.remark}"
    table = Table(*columns, title=title, title_justify="left")
    for layout, found in sorted(verified.items(), key=lambda item: (item[0] not in fitting, item[1].seconds)):
        remark = "chosen" if layout == best else "tie" if layout in tied else "" if layout in fitting else "too much"
        micro_batches = f"{search.num_micro_batches(layout)} of {layout.micro_batch_size}"
        figures = f"{found.device_peak_bytes / 1e9:.1f}", _seconds(found.seconds), f"{search.mfu(found):.1%}"
        table.add_row(layout.division, micro_batches, *figures, remark)
    return table


def closed_form_table(others: Sequence[Prediction]) -> Table:
    """Return a table of layouts that no dry run has estimated, with the bounds of closed forms."""
    title = "Others, by closed forms alone: these leave out much of the time,\nso do not compare them with those above"
    columns = Column("layout", max_width=33), *right_aligned("micro-\nbatches", "GB", "seconds, from - to")
    table = Table(*columns, title=title, title_justify="left")
    for found in others[:NUM_SHOWN]:
        micro_batches = f"{found.num_micro_batches} of {found.layout.micro_batch_size}"
        bounds = f"{_seconds(found.overlapped_seconds)} - {_seconds(found.seconds)}"
        table.add_row(found.layout.division, micro_batches, f"{found.device_bytes / 1e9:.1f}", bounds)
    return table


def chosen_lines(fitting: Mapping[CandidateLayout, Estimate], search: Search) -> Iterator[str]:
    """Yield lines with the layout that the planner recommends, why, and the figures of its dry run."""
    best, tied = search.choose(fitting)
    cluster, settings, found = search.cluster, search.settings, fitting[best]
    yield f"chosen: {best}"
    if len(tied) > 1:
        stated = "error of the projection" if cluster.median_error is not None else "assumed error of the projection"
        yield (
            f"a tie: {len(tied)} layouts are within the {stated}, {search.error:.0%}, of the fastest ({tied[0]}, "
            f"{_seconds(fitting[tied[0]].seconds)} s); the one with the most room wins, and of equal "
            "ones that with fewer divided or offloaded states, then with a smaller tensor size"
        )
    yield (
        f"{found.device_peak_bytes / 1e9:.1f} GB at the peak, {found.device_peak_bytes / cluster.gpu_memory_bytes:.0%} "
        f"of a GPU's {cluster.gpu_memory_bytes / 1e9:.1f} GB, of which {cluster.usable_gpu_bytes / 1e9:.1f} may be "
        f"used: --reserved_gb={cluster.reserved_gb:g} is left free for CUDA, NCCL and gaps of the allocator"
    )
    tokens_per_second = settings.train.global_batch_size * settings.model.seq_length / found.seconds
    yield (
        f"{_seconds(found.seconds)} s a step{cluster.remark}, MFU {search.mfu(found):.1%}, "
        f"{tokens_per_second / search.world_size:,.0f} tokens/s a GPU"
    )
    if settings.data.mask_documents:
        yield "documents are kept apart: time and MFU are those of one document a sequence, which takes the most time"
    yield f"the whole run: {search.cost(found)}{cluster.remark}"
    yield from nearest_lines(settings, cluster, search.world_size)


def launch_lines(search: Search, settings: Settings, path: Path) -> Iterator[str]:
    """Yield how the settings in a file are run, and last the command that runs as pasted: Slurm starts several nodes.

    It saves by time, since a plan knows no number of steps that suits.
    """
    num_nodes, gpus_per_node = search.num_nodes, search.cluster.gpus_per_node
    minutes = settings.checkpoint.every_minutes or CheckpointSettings().every_minutes
    options = f"--config {shlex.quote(str(path))} --checkpoint.every_minutes {minutes:g}"
    launch = f"RANKS_PER_NODE={gpus_per_node} scripts/launch/torchrun.sh {options}"
    gpus = "" if gpus_per_node == 8 else f" --gpus-per-node={gpus_per_node}"
    yield f"settings: {path}; their dry run: {dry_run_path(path)}"
    if num_nodes > 1:
        yield f"without Slurm, on every node, where HOST is the first: NNODES={num_nodes} RDZV=HOST:29500 {launch}"
        launch = f"sbatch --nodes={num_nodes}{gpus} scripts/launch/slurm.sbatch {options}"
    yield f"start it from the repository's folder, with the data in {settings.data.path}:"
    yield launch


def dry_run_path(path: Path) -> Path:
    return path.with_suffix(".dry_run.json")


def dry_run_record(layout: CandidateLayout, estimate: Estimate, search: Search) -> dict[str, Any]:
    """Return the dry run of a layout for JSON: bytes of a rank, seconds of a step, and the parts of both."""
    where = {"cluster": search.cluster.name, "gpus": search.world_size, "fits": search.fits(estimate)}
    return where | {"layout": vars(layout), "mfu": search.mfu(estimate)} | vars(estimate)


def _seconds(number: float) -> str:
    """Return seconds with three digits, such as 1.40 and 161."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def too_large_line(found: Prediction, cluster: ClusterSpec, remedies: Sequence[Remedy]) -> str:
    """Return a line that says by how much a layout exceeds the memory, and what makes it fit."""
    on_device = (found.device_bytes - cluster.usable_gpu_bytes) / 1e9
    on_host = found.host_bytes / 1e9 - cluster.host_memory_gb
    reason = f"{on_device:.1f} GB too much on a GPU" if on_device > 0 else f"{on_host:.0f} GB too much on a host"
    remedy = f"; it fits with {' or '.join(map(str, remedies[:MAX_REMEDIES]))}" if remedies else ""
    return f"does not fit: {found.layout}: {reason}{remedy}"


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
