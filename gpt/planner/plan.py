"""The planner, which finds the fastest layout to train a model on a cluster, or the largest model that fits.

    python -m gpt.planner.plan --cluster configs/clusters/dgx-2.yaml --nodes 25 --config FILE [--largest]

Closed forms rank all layouts; the best few are then verified by dry runs at two shallow depths.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console
from rich.table import Table

from gpt.monitor.console import make_console, print_table
from gpt.option_names import errors_in_option_names
from gpt.planner.depth import DepthExtrapolation, Estimate, extrapolate, shallow_runs
from gpt.planner.layouts import CandidateLayout, Prediction, candidate_layouts, fits, predict
from gpt.planner.plan_report import best_line, estimate_fits, model_tflops_per_gpu, plan_table, too_large_line
from gpt.settings import Settings
from gpt.settings_parser import parse_settings
from parallel.errors import ConfigError, exit_on_config_error
from parallel.launch.cluster import ClusterSpec

MAX_DRY_RUNS = 3  # for each layout to verify, because some turn out not to fit


@dataclass(frozen=True)
class Plan:
    """The layouts that fit and those that do not, each with the memory and time that closed forms predict."""

    fitting: list[Prediction]  # the fastest layout of each family, the fastest family first
    too_large: list[Prediction]  # the layout with the least device memory of each partition in which none fits


def make_plan(settings: Settings, cluster: ClusterSpec, world_size: int) -> Plan:
    """Return the plan for a world. Raise ConfigError if no layout divides it and the batch, or none fits."""
    layouts = candidate_layouts(cluster.gpus_per_node, settings.train.global_batch_size, settings.offload.mode)
    predictions = (predict(layout, settings, cluster, world_size) for layout in layouts)
    possible = [found for found in predictions if found is not None]
    if not possible:
        raise ConfigError(
            f"no layout divides train.global_batch_size={settings.train.global_batch_size} sequences over "
            f"{world_size} ranks; choose a multiple of {world_size}"
        )
    fitting = [found for found in possible if fits(found, cluster)]
    if not fitting:
        usable = cluster.usable_gpu_bytes
        smallest = min(possible, key=lambda found: found.device_bytes)
        raise ConfigError(
            f"the model does not fit on {world_size} GPUs: the layout with the least memory ({smallest.layout}) needs "
            f"{smallest.device_bytes / 1e9:.1f} GB of {usable / 1e9:.1f}, {(smallest.device_bytes - usable) / 1e9:.1f} "
            "too much; use more nodes or a smaller model"
        )
    fastest: dict[tuple, Prediction] = {}
    for found in sorted(fitting, key=closed_form_rank):
        fastest.setdefault(found.layout.family, found)
    partitions = {found.layout.partition for found in possible} - {found.layout.partition for found in fitting}
    too_large = [
        min((found for found in possible if found.layout.partition == one), key=lambda found: found.device_bytes)
        for one in sorted(partitions)
    ]
    return Plan(list(fastest.values()), too_large)


def closed_form_rank(found: Prediction) -> tuple[float, int]:
    """Return the key by which layouts are sorted.

    Closed forms leave out that small products reach less of a GPU's rate, so of those that are equally fast, the one
    with the fewest micro-batches is the first.
    """
    return float(f"{found.seconds:.3g}"), found.num_micro_batches


def extrapolate_layout(layout: CandidateLayout, settings: Settings, cluster: ClusterSpec) -> DepthExtrapolation:
    """Return the extrapolation from two shallow dry runs with the layout, in the world of `settings.dry_run`."""
    return extrapolate(shallow_runs(layout.applied_to(settings)), cluster)


def deepest_models(settings: Settings, cluster: ClusterSpec, world_size: int) -> list[tuple[int, CandidateLayout]]:
    """Return (number of layers that fit by closed forms, layout) for each family of layouts, the deepest first.

    A family is represented by the layout with the smallest micro-batch that divides the batch. Raise ConfigError if
    not even one layer fits.
    """

    def with_depth(num_layers: int) -> Settings:
        return replace(settings, model=replace(settings.model, num_layers=num_layers))

    make_plan(with_depth(1), cluster, world_size)
    smallest: dict[tuple, CandidateLayout] = {}
    for layout in candidate_layouts(cluster.gpus_per_node, settings.train.global_batch_size, settings.offload.mode):
        if predict(layout, settings, cluster, world_size) is not None:
            smallest.setdefault(layout.family, layout)
    found = []
    for layout in smallest.values():

        def depth_fits(num_layers: int, layout: CandidateLayout = layout) -> bool:
            prediction = predict(layout, with_depth(num_layers), cluster, world_size)
            return prediction is not None and fits(prediction, cluster)

        found.append((largest_fitting(depth_fits), layout))
    return sorted(found, key=lambda pair: pair[0], reverse=True)


def largest_fitting(number_fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, by bisection, if 0 and every number below one that fits also fit."""
    low, high = 0, 1
    while number_fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if number_fits(middle) else (low, middle)
    return low


@errors_in_option_names()
def main(arguments: list[str]) -> None:
    """Print a plan and the command that starts its best run."""
    parser = argparse.ArgumentParser(prog="python -m gpt.planner.plan", description=__doc__)
    parser.add_argument("--cluster", required=True, help="cluster file, such as configs/clusters/dgx-2.yaml")
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--largest", action="store_true", help="find the largest number of layers that fits")
    parser.add_argument("--verify", type=int, default=3, help="number of layouts to verify by dry runs")
    own, others = parser.parse_known_args(arguments)
    console = make_console()
    cluster = ClusterSpec.load(own.cluster)
    settings = parse_settings(others, max(1, own.nodes) * cluster.gpus_per_node, partial(print_table, console))
    if own.nodes < 1 or own.verify < 1:
        raise ConfigError(f"--nodes={own.nodes} or --verify={own.verify} is below 1; choose 1 or more")
    world_size = own.nodes * cluster.gpus_per_node
    settings = replace(settings, dry_run=replace(settings.dry_run, world_size=world_size, cluster=own.cluster))
    report = report_largest if own.largest else report_plan
    options = report(settings, cluster, world_size, own.verify, console)
    launch = f"NNODES={own.nodes} RDZV=HOST:29500 RANKS_PER_NODE={cluster.gpus_per_node} scripts/launch/torchrun.sh"
    console.print(f"\nOn every node:\n{launch} \\\n    {' '.join([*others, *options])}")


def report_plan(
    settings: Settings, cluster: ClusterSpec, world_size: int, num_to_verify: int, console: Console
) -> list[str]:
    """Print the layouts, and return the options of the fastest one that fits in a dry run."""
    model, batch = settings.model, settings.train.global_batch_size
    _progress("computing the memory and time of all layouts by closed forms")
    plan = make_plan(settings, cluster, world_size)
    verified = verify(plan, settings, cluster, num_to_verify)
    tflops = {layout: model_tflops_per_gpu(model, batch, world_size, found) for layout, found in verified.items()}
    print_table(console, plan_table(plan.fitting, verified, tflops, cluster))
    for found in plan.too_large:
        console.print(too_large_line(found, cluster))
    fitting = [layout for layout, found in verified.items() if estimate_fits(found, cluster)]
    if not fitting:
        raise ConfigError(f"none of the {len(verified)} best layouts fits in a dry run; raise --verify={num_to_verify}")
    best = min(fitting, key=lambda layout: verified[layout].seconds)
    console.print(best_line(best, verified[best], cluster))
    return best.options(batch)


def verify(plan: Plan, settings: Settings, cluster: ClusterSpec, num_to_verify: int) -> dict[CandidateLayout, Estimate]:
    """Estimate the fastest layouts by dry runs, until `num_to_verify` of them fit or MAX_DRY_RUNS times as many ran.

    Of those that fit, at most one has the same partition.
    """
    verified: dict[CandidateLayout, Estimate] = {}
    partitions: set[tuple] = set()  # of the layouts that fit
    most = min(MAX_DRY_RUNS * num_to_verify, len(plan.fitting))
    for layout in (found.layout for found in plan.fitting):
        if len(partitions) == num_to_verify or len(verified) == most:
            break
        if layout.partition not in partitions:
            _progress(f"dry run {len(verified) + 1} of at most {most}: {layout}")
            verified[layout] = extrapolate_layout(layout, settings, cluster).at(settings.model.num_layers)
            if estimate_fits(verified[layout], cluster):
                partitions.add(layout.partition)
    return verified


def _progress(line: str) -> None:
    """Print a line to stderr, since a plan takes minutes; stdout has the plan alone."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def report_largest(
    settings: Settings, cluster: ClusterSpec, world_size: int, num_to_verify: int, console: Console
) -> list[str]:
    """Print how deep the model can be with the best layouts, and return the options of the deepest by dry run."""
    model = settings.model
    table = Table(title=f"The most layers of hidden size {model.hidden_size}", title_justify="left")
    table.add_column("layout", no_wrap=True)
    for heading in ("closed forms", "dry run", "parameters", "GB"):
        table.add_column(heading, justify="right")
    max_layers: dict[CandidateLayout, int] = {}
    _progress("computing the largest models of all layouts by closed forms")
    for predicted, layout in deepest_models(settings, cluster, world_size)[:num_to_verify]:
        _progress(f"dry run {len(max_layers) + 1} of {num_to_verify}: {layout}")
        # Two micro-batches are enough: later ones need as much memory as the second.
        batch = min(settings.train.global_batch_size, 2 * layout.micro_batch_size * world_size // layout.tensor_size)
        short_step = replace(settings, train=replace(settings.train, global_batch_size=batch))
        extrapolation = extrapolate_layout(layout, short_step, cluster)
        host_bytes = cluster.host_memory_gb * 1e9 / cluster.gpus_per_node
        max_layers[layout] = extrapolation.max_layers(cluster.usable_gpu_bytes, host_bytes)
        estimate = extrapolation.at(max_layers[layout])
        figures = f"{estimate.parameters / 1e9:.1f}B", f"{estimate.device_peak_bytes / 1e9:.1f}"
        table.add_row(str(layout), str(predicted), str(max_layers[layout]), *figures)
    print_table(console, table)
    best = max(max_layers, key=lambda layout: max_layers[layout])
    console.print(f"{max_layers[best]} layers of hidden size {model.hidden_size} are the most that fit, by dry run")
    return [f"--model.num_layers={max_layers[best]}", *best.options(settings.train.global_batch_size)]


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
