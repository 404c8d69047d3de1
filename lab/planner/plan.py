"""The planner, which finds the fastest layout to train a model on a cluster, or the largest model that fits.

    python -m lab.planner.plan --cluster configs/clusters/dgx-2.yaml --nodes 25 --config FILE [--largest]
    python -m lab.planner.plan --cluster configs/clusters/dgx-2.yaml --nodes 8 16 25 --config FILE --front PLOT.png

Closed forms rank all layouts, once as if computation hid no traffic of the data axis, and once as if it hid all that it
can; the best few of both orders are then verified by dry runs at two shallow depths.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gpt.monitor.console import make_console, print_table
from gpt.settings.option_names import messages_in_option_names
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from lab.dryrun.collectives import right_aligned
from lab.dryrun.run_cost import RunCost
from lab.measure.cluster import ClusterSpec
from lab.planner.closed_forms import RANKS, Plan, deepest_models, make_plan
from lab.planner.depth import DepthExtrapolation, Estimate, extrapolate, shallow_runs
from lab.planner.front import Choice, front, front_table, plot_front, spread
from lab.planner.layouts import CandidateLayout
from lab.planner.plan_report import (
    best_line,
    estimate_fits,
    launch_command,
    model_tflops_per_gpu,
    overridden,
    plan_table,
    too_large_line,
)
from parallel.errors import ConfigError, exit_on_config_error

MAX_DRY_RUNS = 3  # for each layout to verify, because some turn out not to fit
DEFAULT_TO_VERIFY = 3  # layouts
EstimateLayout = Callable[[CandidateLayout], Estimate]


def extrapolate_layout(
    layout: CandidateLayout, settings: Settings, cluster: ClusterSpec, world_size: int, folder: Path | None = None
) -> DepthExtrapolation:
    """Return the extrapolation from two shallow dry runs with the layout; `folder`, if there is one, keeps them."""
    in_world = replace(settings, dry_run=replace(settings.dry_run, world_size=world_size))
    settings = layout.applied_to(in_world)
    return extrapolate(shallow_runs(settings, folder), cluster, settings.audit_share(world_size))


@messages_in_option_names()
def main(arguments: list[str]) -> None:
    """Print a plan and the command that starts its best run."""
    parser = argparse.ArgumentParser(prog="python -m lab.planner.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", required=True, help="cluster file, such as configs/clusters/dgx-2.yaml")
    parser.add_argument("--nodes", type=int, nargs="+", required=True, help="number of nodes; several with --front")
    parser.add_argument("--largest", action="store_true", help="find the largest number of layers that fits")
    parser.add_argument("--front", metavar="PLOT", help="image file: also show which layouts save memory or GPU hours")
    parser.add_argument("--verify", type=int, default=DEFAULT_TO_VERIFY, help="number of layouts to verify by dry runs")
    own, others = parser.parse_known_args(arguments)
    console = make_console()
    cluster = ClusterSpec.load(own.cluster)
    if min(own.nodes) < 1 or own.verify < 1:
        raise ConfigError(f"--nodes={min(own.nodes)} or --verify={own.verify} is below 1; choose 1 or more")
    if len(own.nodes) > 1 and not own.front:
        raise ConfigError(f"--nodes={own.nodes} are {len(own.nodes)} numbers, which only --front=PLOT compares")
    settings = parse_settings(others, own.nodes[0] * cluster.gpus_per_node, partial(print_table, console))
    settings = replace(settings, dry_run=replace(settings.dry_run, cluster=own.cluster))
    num_nodes = own.nodes[0]
    if own.front:
        num_nodes, options = report_front(settings, cluster, own.nodes, own.verify, Path(own.front), console)
    else:
        report = report_largest if own.largest else report_plan
        options = report(settings, cluster, num_nodes * cluster.gpus_per_node, own.verify, console)
    command = launch_command(num_nodes, cluster.gpus_per_node, overridden(others, options))
    console.print(f"\nOn every node, where HOST is the first of them:\n{command}")


def report_plan(
    settings: Settings, cluster: ClusterSpec, world_size: int, num_to_verify: int, console: Console
) -> list[str]:
    """Print the layouts, and return the options of the fastest one that fits in a dry run."""
    fitting = plan_and_verify(settings, cluster, world_size, num_to_verify, console)[1]
    if not fitting:
        raise ConfigError(f"none of the best layouts fits in a dry run; raise --verify={num_to_verify}")
    best = min(fitting, key=lambda layout: fitting[layout].seconds)
    console.print(best_line(best, fitting[best], cluster))
    return best.options(settings.train.global_batch_size)


def plan_and_verify(
    settings: Settings, cluster: ClusterSpec, world_size: int, num_to_verify: int, console: Console
) -> tuple[Plan, dict[CandidateLayout, Estimate]]:
    """Print the layouts for a world, and return the plan and what fits of it, as dry runs estimate it."""
    show_progress(f"computing the memory and time of all layouts on {world_size} GPUs by closed forms")
    plan = make_plan(settings, cluster, world_size)

    def estimate_layout(layout: CandidateLayout) -> Estimate:
        return extrapolate_layout(layout, settings, cluster, world_size).at(settings.model.num_layers)

    verified = verify(plan, estimate_layout, cluster, num_to_verify)
    batch = settings.train.global_batch_size
    tflops = {one: model_tflops_per_gpu(settings.model, batch, world_size, found) for one, found in verified.items()}
    print_table(console, plan_table(plan.fitting, verified, tflops, cluster))
    for found in plan.too_large:
        console.print(too_large_line(found, cluster))
    return plan, {layout: found for layout, found in verified.items() if estimate_fits(found, cluster)}


def report_front(
    settings: Settings, cluster: ClusterSpec, nodes: list[int], num_to_verify: int, plot: Path, console: Console
) -> tuple[int, list[str]]:
    """Print the layouts for each number of nodes, and print and plot the front of all.

    Return the number of nodes and the options of the fastest. Numbers of nodes on which none fits are passed over.
    """
    choices: list[Choice] = []
    for num_nodes in nodes:
        world_size = num_nodes * cluster.gpus_per_node
        try:
            plan, found = plan_and_verify(settings, cluster, world_size, num_to_verify, console)
        except ConfigError as error:
            console.print(f"{num_nodes} nodes: {error}")
            continue
        for layout in spread(plan.fitting, num_to_verify):
            if layout not in found:
                show_progress(f"dry run of a layout that saves memory: {layout}")
                found[layout] = extrapolate_layout(layout, settings, cluster, world_size).at(settings.model.num_layers)
        choices += [
            Choice(num_nodes, layout, estimate, RunCost.of(settings, estimate.seconds, world_size, cluster))
            for layout, estimate in found.items()
            if estimate_fits(estimate, cluster)
        ]
    if not choices:
        raise ConfigError(f"no layout fits on --nodes={nodes}; use more nodes or a smaller model")
    chosen = front(choices, lambda one: one.figures)
    print_table(console, front_table(chosen, cluster))
    try:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot_front(choices, chosen, plot, cluster)
    except OSError as error:
        raise ConfigError(f"--front={plot} cannot be written ({error.strerror}); choose another file") from error
    console.print(f"the plot is {plot}")
    return chosen[0].num_nodes, chosen[0].layout.options(settings.train.global_batch_size)


def verify(
    plan: Plan, estimate_layout: EstimateLayout, cluster: ClusterSpec, num_to_verify: int
) -> dict[CandidateLayout, Estimate]:
    """Estimate the first layouts of each order, until `num_to_verify` partitions have one that fits.

    One of each tensor size is estimated, too: closed forms leave out the small kernels that tensor parallelism does not
    divide. At most MAX_DRY_RUNS times `num_to_verify` are tried in an order.
    """
    verified: dict[CandidateLayout, Estimate] = {}
    for rank in RANKS:
        partitions: set[tuple] = set()  # of the layouts that fit
        tensor_sizes: set[int] = set()
        num_tried = 0
        for layout in (found.layout for found in sorted(plan.fitting, key=rank)):
            is_new = layout.partition not in partitions and len(partitions) < num_to_verify
            if num_tried == MAX_DRY_RUNS * num_to_verify or not (is_new or layout.tensor_size not in tensor_sizes):
                continue
            num_tried += 1
            if layout not in verified:
                show_progress(f"dry run {len(verified) + 1}: {layout}")
                verified[layout] = estimate_layout(layout)
            if estimate_fits(verified[layout], cluster):
                partitions.add(layout.partition)
                tensor_sizes.add(layout.tensor_size)
    return verified


def show_progress(line: str) -> None:
    """Print a line to stderr, since a plan takes minutes; stdout has the plan alone."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def report_largest(
    settings: Settings, cluster: ClusterSpec, world_size: int, num_to_verify: int, console: Console
) -> list[str]:
    """Print how deep the model can be with the best layouts, and return the options of the deepest by dry run."""
    model = settings.model
    columns = right_aligned("closed forms", "dry run", "parameters", "GB")
    table = Table("layout", *columns, title=f"The most layers of hidden size {model.hidden_size}", title_justify="left")
    max_layers: dict[CandidateLayout, int] = {}
    show_progress("computing the largest models of all layouts by closed forms")
    for predicted, layout in deepest_models(settings, cluster, world_size)[:num_to_verify]:
        show_progress(f"dry run {len(max_layers) + 1} of {num_to_verify}: {layout}")
        extrapolation = extrapolate_layout(layout, settings, cluster, world_size)
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
