"""The tables and lines that the planner prints."""

import shlex
from collections.abc import Mapping, Sequence

from rich.table import Column, Table

from gpt.shape.config import ModelConfig
from gpt.shape.flops import model_flops
from lab.dryrun.collectives import right_aligned
from lab.measure.cluster import ClusterSpec
from lab.planner.depth import Estimate
from lab.planner.layouts import CandidateLayout, Prediction

MAX_COLUMNS = 80
NUM_SHOWN = 10  # layouts in the table; all that a dry run has estimated are shown


def estimate_fits(estimate: Estimate, cluster: ClusterSpec) -> bool:
    """Return True if the estimated memory fits a GPU and, with those of the node's other ranks, its host."""
    return cluster.holds(estimate.device_peak_bytes, estimate.host_peak_bytes * cluster.gpus_per_node)


def in_order(
    fitting: list[Prediction], verified: Mapping[CandidateLayout, Estimate], cluster: ClusterSpec
) -> tuple[list[Prediction], list[Prediction]]:
    """Return the predictions that dry runs have verified, by the time of these, and the others in their order.

    They are not mixed, because closed forms leave out much of the time. Layouts that do not fit in a dry run are last.
    """

    def rank(found: Prediction) -> tuple[bool, float]:
        estimate = verified[found.layout]
        return not estimate_fits(estimate, cluster), estimate.seconds

    first = sorted((found for found in fitting if found.layout in verified), key=rank)
    return first, [found for found in fitting if found.layout not in verified]


def plan_table(
    fitting: list[Prediction],
    verified: Mapping[CandidateLayout, Estimate],
    tflops_per_gpu: Mapping[CandidateLayout, float],
    cluster: ClusterSpec,
) -> Table:
    """Return a table of the layouts: first those that dry runs have verified, then the fastest others.

    It has up to MAX_COLUMNS columns. The figures of the others are those of closed forms.
    """
    title = f"Layouts by the time of a step{cluster.remark}\nof dry runs; below the line of closed forms"
    figures = right_aligned("micro-\nbatches", "GB", "seconds", "model\nTFLOPs")
    table = Table(Column("layout", max_width=33), *figures, title=title, title_justify="left")

    def add_row(found: Prediction, memory: str, seconds: float, tflops: str = "") -> None:
        micro_batches = f"{found.num_micro_batches} of {found.layout.micro_batch_size}"
        table.add_row(found.layout.division, micro_batches, memory, _seconds(seconds), tflops)

    first, others = in_order(fitting, verified, cluster)
    for found in first:
        estimate = verified[found.layout]
        too_much = "" if estimate_fits(estimate, cluster) else "\ntoo much"
        memory = f"{estimate.device_peak_bytes / 1e9:.1f}{too_much}"
        add_row(found, memory, estimate.seconds, f"{tflops_per_gpu[found.layout]:.1f}")
    table.add_section()
    for found in others[: max(0, NUM_SHOWN - len(first))]:
        add_row(found, f"{found.device_bytes / 1e9:.1f}", found.seconds)
    return table


def model_tflops_per_gpu(model: ModelConfig, global_batch_size: int, world_size: int, estimate: Estimate) -> float:
    """Return the rate at which a GPU performs what learning needs, so recomputation does not count."""
    return model_flops(model, global_batch_size) / world_size / estimate.seconds / 1e12


def best_line(layout: CandidateLayout, estimate: Estimate, cluster: ClusterSpec) -> str:
    """Return lines with the layout that the planner recommends, and the figures of its dry run."""
    return (
        f"the fastest of those that fit in a dry run: {layout}:\n"
        f"{estimate.device_peak_bytes / 1e9:.1f} of {cluster.usable_gpu_bytes / 1e9:.1f} GB "
        f"({cluster.reserved_gb:.2g} GB of each GPU is reserved for CUDA and NCCL),\n"
        f"{_seconds(estimate.seconds)} s a step{cluster.remark}"
    )


def launch_command(num_nodes: int, gpus_per_node: int, options: Sequence[str]) -> str:
    """Return the command that starts a run on each node, in lines of at most 80 columns if its words are that short."""
    lines = [f"NNODES={num_nodes} RDZV=HOST:29500 RANKS_PER_NODE={gpus_per_node} scripts/launch/torchrun.sh"]
    for word in map(shlex.quote, options):
        if len(lines[-1]) + len(word) > MAX_COLUMNS - len("  \\"):
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def overridden(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the words of a command line without the options that are in `options`, and these after them."""
    chosen = {option.partition("=")[0] for option in options}
    kept: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, _ = word.partition("=")
        value = [] if equals else [next(remaining)]  # --NAME VALUE
        kept += [] if name in chosen else [word, *value]
    return [*kept, *options]


def _seconds(number: float) -> str:
    """Return seconds with three digits, such as 1.40 and 161."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def too_large_line(found: Prediction, cluster: ClusterSpec) -> str:
    """Return a line that says by how much a layout exceeds the memory."""
    on_device = (found.device_bytes - cluster.usable_gpu_bytes) / 1e9
    on_host = found.host_bytes / 1e9 - cluster.host_memory_gb
    reason = f"{on_device:.1f} GB too much on a GPU" if on_device > 0 else f"{on_host:.0f} GB too much on a host"
    return f"does not fit: {found.layout}: {reason}"
