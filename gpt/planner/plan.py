"""The planner, which finds the fastest layout to train a model on a cluster, or the largest model that fits.

    python -m gpt.planner.plan --cluster configs/clusters/dgx-2.yaml --nodes 25 --config FILE [--largest]

Closed forms rank all layouts; the best few are then verified by dry runs at two shallow depths.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from gpt.model.flops import hardware_flops
from gpt.model.transformer import ModelConfig
from gpt.option_names import errors_in_option_names
from gpt.planner.depth import DepthExtrapolation, Estimate, extrapolate, shallow_runs
from gpt.planner.layouts import CandidateLayout, Prediction, candidate_layouts, fits, predict, usable_bytes
from gpt.settings import Settings
from gpt.settings_parser import parse_settings
from parallel.errors import ConfigError, exit_on_config_error
from parallel.launch.cluster import ClusterSpec

MAX_DRY_RUNS = 3  # for each layout to verify, because some turn out not to fit


@dataclass(frozen=True)
class Plan:
    """The layouts that fit and those that do not, each with the memory and time that closed forms predict."""

    fitting: list[Prediction]  # the fastest layout of each family, the fastest family first
    too_large: list[Prediction]  # the layout with the least device memory of each family in which none fits


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
        usable = usable_bytes(cluster)
        smallest = min(possible, key=lambda found: found.device_bytes)
        raise ConfigError(
            f"the model does not fit on {world_size} GPUs: the layout with the least memory ({smallest.layout}) needs "
            f"{smallest.device_bytes / 1e9:.1f} GB of {usable / 1e9:.1f}, {(smallest.device_bytes - usable) / 1e9:.1f} "
            "too much; use more nodes or a smaller model"
        )
    fastest: dict[tuple, Prediction] = {}
    for found in sorted(fitting, key=lambda found: found.seconds):
        fastest.setdefault(found.layout.family, found)
    families = {found.layout.family for found in possible} - set(fastest)
    too_large = [
        min((found for found in possible if found.layout.family == family), key=lambda found: found.device_bytes)
        for family in sorted(families)
    ]
    return Plan(list(fastest.values()), too_large)


def extrapolate_layout(layout: CandidateLayout, settings: Settings, cluster: ClusterSpec) -> DepthExtrapolation:
    """Return the extrapolation from two shallow dry runs with the layout, in the world of `settings.dry_run`."""
    chosen = replace(
        settings,
        parallel=replace(settings.parallel, tensor_size=layout.tensor_size),
        zero=replace(settings.zero, stage=layout.stage),
        activations=replace(settings.activations, store=layout.store),
        offload=replace(settings.offload, mode=layout.offload),
        train=replace(settings.train, micro_batch_size=layout.micro_batch_size),
    )
    return extrapolate(shallow_runs(chosen), cluster)


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


def plan_table(
    plan: Plan,
    verified: dict[CandidateLayout, Estimate],
    model: ModelConfig,
    global_batch_size: int,
    cluster: ClusterSpec,
) -> Table:
    """Return a table of the ten fastest layouts, with the estimates of those that a dry run has verified."""
    table = Table(title="Layouts by predicted time of a step", title_justify="left")
    table.add_column("layout", no_wrap=True)
    for heading in ("micro batches", "GB", "s per step", "dry run: GB", "s per step", "TFLOPs per GPU"):
        table.add_column(heading, justify="right")
    for found in plan.fitting[:10]:
        cells = ["", "", ""]
        if estimate := verified.get(found.layout):
            flops = hardware_flops(model, global_batch_size, "blocks")
            sequences_per_gpu = found.num_micro_batches * found.layout.micro_batch_size / found.layout.tensor_size
            num_gpus = global_batch_size / sequences_per_gpu
            remark = "" if estimate.device_peak_bytes <= cluster.gpu_memory_bytes else " (too much)"
            tflops = flops / num_gpus / estimate.seconds / 1e12
            cells = [f"{estimate.device_peak_bytes / 1e9:.1f}{remark}", f"{estimate.seconds:.2f}", f"{tflops:.1f}"]
        figures = [str(found.num_micro_batches), f"{found.device_bytes / 1e9:.1f}", f"{found.seconds:.2f}"]
        table.add_row(str(found.layout), *figures, *cells)
    return table


@errors_in_option_names()
def main(arguments: list[str]) -> None:
    """Print a plan and the command that starts its best run."""
    parser = argparse.ArgumentParser(prog="python -m gpt.planner.plan", description=__doc__)
    parser.add_argument("--cluster", required=True, help="cluster file, such as configs/clusters/dgx-2.yaml")
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--largest", action="store_true", help="find the largest number of layers that fits")
    parser.add_argument("--verify", type=int, default=3, help="number of layouts to verify by dry runs")
    own, others = parser.parse_known_args(arguments)
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 120)
    cluster = ClusterSpec.load(own.cluster)
    settings = parse_settings(others, max(1, own.nodes) * cluster.gpus_per_node, console.print)
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
    plan = make_plan(settings, cluster, world_size)
    verified, fitting = verify(plan, settings, cluster, num_to_verify)
    console.print(plan_table(plan, verified, settings.model, settings.train.global_batch_size, cluster))
    for found in plan.too_large:
        on_device = (found.device_bytes - usable_bytes(cluster)) / 1e9
        on_host = found.host_bytes / 1e9 - cluster.host_memory_gb
        reason = f"{on_device:.1f} GB too much on a GPU" if on_device > 0 else f"{on_host:.0f} GB too much on a host"
        console.print(f"does not fit: {found.layout}: {reason}")
    if not fitting:
        raise ConfigError(f"none of the {len(verified)} best layouts fits in a dry run; raise --verify={num_to_verify}")
    best = min(fitting, key=lambda layout: verified[layout].seconds)
    return best.options(settings.train.global_batch_size)


def verify(
    plan: Plan, settings: Settings, cluster: ClusterSpec, num_to_verify: int
) -> tuple[dict[CandidateLayout, Estimate], list[CandidateLayout]]:
    """Estimate the fastest layouts by dry runs, until `num_to_verify` of them fit or MAX_DRY_RUNS times as many ran.

    Return all estimates, and the layouts that fit: at most one for each tensor size, stage and offload mode.
    """
    verified: dict[CandidateLayout, Estimate] = {}
    fitting: dict[tuple[int, int, str], CandidateLayout] = {}
    for layout in (found.layout for found in plan.fitting):
        if len(fitting) == num_to_verify or len(verified) == MAX_DRY_RUNS * num_to_verify:
            break
        if (layout.tensor_size, layout.stage, layout.offload) not in fitting:
            verified[layout] = extrapolate_layout(layout, settings, cluster).at(settings.model.num_layers)
            if verified[layout].device_peak_bytes <= cluster.gpu_memory_bytes:
                fitting[layout.tensor_size, layout.stage, layout.offload] = layout
    return verified, list(fitting.values())


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
    for predicted, layout in deepest_models(settings, cluster, world_size)[:num_to_verify]:
        # Two micro-batches are enough: later ones need as much memory as the second.
        batch = min(settings.train.global_batch_size, 2 * layout.micro_batch_size * world_size // layout.tensor_size)
        short_step = replace(settings, train=replace(settings.train, global_batch_size=batch))
        extrapolation = extrapolate_layout(layout, short_step, cluster)
        host_bytes = cluster.host_memory_gb * 1e9 / cluster.gpus_per_node
        max_layers[layout] = extrapolation.max_layers(cluster.gpu_memory_bytes, host_bytes)
        estimate = extrapolation.at(max_layers[layout])
        figures = f"{estimate.parameters / 1e9:.1f}B", f"{estimate.device_peak_bytes / 1e9:.1f}"
        table.add_row(str(layout), str(predicted), str(max_layers[layout]), *figures)
    console.print(table)
    best = max(max_layers, key=lambda layout: max_layers[layout])
    console.print(f"{max_layers[best]} layers of hidden size {model.hidden_size} are the most that fit, by dry run")
    return [f"--model.num_layers={max_layers[best]}", *best.options(settings.train.global_batch_size)]


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
