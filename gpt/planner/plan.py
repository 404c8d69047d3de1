"""The planner: which layout a model should train in on a cluster, or which model is the largest that fits.

    python -m gpt.planner.plan --cluster configs/clusters/dgx-2.yaml --nodes 25 --config FILE [--largest]

Every layout is judged by the closed forms; the best few are then run dry at two shallow depths.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from gpt.model.flops import hardware_flops
from gpt.planner.depth import Estimate, Line, draw_line
from gpt.planner.layouts import Judgement, Layout, describe, has_room, judge, layouts, room_bytes
from gpt.settings import Settings
from gpt.settings_parser import parse_settings
from parallel.errors import ConfigError, exit_on_config_error
from parallel.launch.cluster import ClusterSpec

TRIES = 3  # dry runs for each layout that is to be verified: some turn out not to fit


@dataclass(frozen=True)
class Plan:
    fitting: list[Judgement]  # the fastest first
    nearest: list[Judgement]  # of those that don't fit, for each stage and store


def make_plan(settings: Settings, cluster: ClusterSpec, world_size: int) -> Plan:
    """Raises ConfigError where no layout divides the world and the batch, or none fits, with how much is missing."""
    judged = [judge(layout, settings, cluster, world_size) for layout in layouts(cluster, settings)]
    possible = [found for found in judged if found is not None]
    if not possible:
        raise ConfigError(
            f"no layout divides train.global_batch_size={settings.train.global_batch_size} sequences over "
            f"{world_size} ranks; choose a multiple of {world_size}"
        )
    room = room_bytes(cluster)
    fitting = [found for found in possible if has_room(found, cluster)]
    if not fitting:
        smallest = min(possible, key=lambda found: found.memory_bytes)
        raise ConfigError(
            f"the model fits nowhere on {world_size} GPUs: the leanest layout ({describe(smallest.layout)}) needs "
            f"{smallest.memory_bytes / 1e9:.1f} GB of {room / 1e9:.1f}, {(smallest.memory_bytes - room) / 1e9:.1f} too "
            "much; take more nodes or a smaller model"
        )
    best: dict[tuple, Judgement] = {}
    for found in sorted(fitting, key=lambda found: found.seconds):
        best.setdefault(found.layout.kind, found)
    kinds = {found.layout.kind for found in possible} - set(best)
    nearest = [
        min((found for found in possible if found.layout.kind == kind), key=lambda found: found.memory_bytes)
        for kind in sorted(kinds)
    ]
    return Plan(list(best.values()), nearest)


def line_of(layout: Layout, settings: Settings, cluster_file: str, world_size: int) -> Line:
    """By two shallow dry runs."""
    chosen = replace(
        settings,
        parallel=replace(settings.parallel, tensor_size=layout.tensor_size),
        zero=replace(settings.zero, stage=layout.stage),
        activations=replace(settings.activations, store=layout.store),
        offload=replace(settings.offload, mode=layout.offload),
        train=replace(settings.train, micro_batch_size=layout.micro_batch_size),
        dry_run=replace(settings.dry_run, world_size=world_size, cluster=cluster_file),
    )
    return draw_line(chosen, ClusterSpec.load(cluster_file))


def roomiest(settings: Settings, cluster: ClusterSpec, world_size: int) -> list[tuple[int, Layout]]:
    """(layers of the settings' width that fit by the closed forms, layout), the most first; each kind of layout with
    the smallest micro-batch that divides. Raises ConfigError where not even one layer fits.
    """

    def deep(num_layers: int) -> Settings:
        return replace(settings, model=replace(settings.model, num_layers=num_layers))

    make_plan(deep(1), cluster, world_size)
    leanest: dict[tuple, Layout] = {}
    for layout in layouts(cluster, settings):
        if judge(layout, settings, cluster, world_size) is not None:
            leanest.setdefault(layout.kind, layout)
    found = []
    for layout in leanest.values():

        def fits(num_layers: int, layout: Layout = layout) -> bool:
            judged = judge(layout, deep(num_layers), cluster, world_size)
            return judged is not None and has_room(judged, cluster)

        found.append((largest(fits), layout))
    return sorted(found, key=lambda one: one[0], reverse=True)


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits where all smaller ones do; 0 fits."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plan_table(plan: Plan, verified: dict[Layout, Estimate], settings: Settings, cluster: ClusterSpec) -> Table:
    table = Table(title="Layouts, the fastest first", title_justify="left")
    table.add_column("layout", no_wrap=True)
    for heading in ("accumulated", "GB", "s a step", "dry run: GB", "s a step", "TFLOPs a GPU"):
        table.add_column(heading, justify="right")
    for found in plan.fitting[:10]:
        cells = ["", "", ""]
        if dry := verified.get(found.layout):
            flops = hardware_flops(settings.model, settings.train.global_batch_size, "blocks")
            ranks = found.num_micro_batches * found.layout.micro_batch_size / found.layout.tensor_size
            size = settings.train.global_batch_size / ranks
            fits = "" if dry.device_peak_bytes <= cluster.gpu_memory_bytes else " (too much)"
            rate = flops / size / dry.seconds / 1e12
            cells = [f"{dry.device_peak_bytes / 1e9:.1f}{fits}", f"{dry.seconds:.2f}", f"{rate:.1f}"]
        figures = [str(found.num_micro_batches), f"{found.memory_bytes / 1e9:.1f}", f"{found.seconds:.2f}"]
        table.add_row(describe(found.layout), *figures, *cells)
    return table


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m gpt.planner.plan", description=__doc__)
    parser.add_argument("--cluster", required=True, help="file of the machine, such as configs/clusters/dgx-2.yaml")
    parser.add_argument("--nodes", type=int, required=True, help="nodes of it")
    parser.add_argument("--largest", action="store_true", help="find the largest number of layers that fits")
    parser.add_argument("--verify", type=int, default=3, help="layouts that fit in a dry run")
    own, others = parser.parse_known_args(arguments)
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 120)
    cluster = ClusterSpec.load(own.cluster)
    settings = parse_settings(others, max(1, own.nodes) * cluster.gpus_per_node, console.print)
    if own.nodes < 1 or own.verify < 1:
        raise ConfigError(f"--nodes={own.nodes} or --verify={own.verify} is below 1; choose 1 or more")
    answer = say_largest if own.largest else say_plan
    options = answer(own, settings, cluster, console)
    launch = f"NNODES={own.nodes} RDZV=HOST:29500 RANKS_PER_NODE={cluster.gpus_per_node} scripts/launch/torchrun.sh"
    console.print(f"\nOn every node:\n{launch} \\\n    {' '.join([*others, *options])}")


def say_plan(own: argparse.Namespace, settings: Settings, cluster: ClusterSpec, console: Console) -> list[str]:
    """Shows the layouts; returns the options of the best that was run dry."""
    world_size = own.nodes * cluster.gpus_per_node
    plan = make_plan(settings, cluster, world_size)
    verified, usable = verify(plan, own, settings, cluster)
    console.print(plan_table(plan, verified, settings, cluster))
    for found in plan.nearest:
        needed = found.memory_bytes - room_bytes(cluster)
        node = found.host_bytes / 1e9 - cluster.host_memory_gb
        reason = f"{needed / 1e9:.1f} GB too much on a GPU" if needed > 0 else f"{node:.0f} GB too much on a host"
        console.print(f"does not fit: {describe(found.layout)}: {reason}")
    if not usable:
        raise ConfigError(f"none of the {len(verified)} best layouts fits in a dry run; raise --verify={own.verify}")
    best = min(usable, key=lambda layout: verified[layout].seconds)
    return best.options(settings.train.global_batch_size)


def verify(
    plan: Plan, own: argparse.Namespace, settings: Settings, cluster: ClusterSpec
) -> tuple[dict[Layout, Estimate], list[Layout]]:
    """(what was run dry, those that fit), the fastest first: one that fits for each tensor size and stage."""
    verified: dict[Layout, Estimate] = {}
    usable: dict[tuple[int, int, str], Layout] = {}
    for layout in (found.layout for found in plan.fitting):
        if len(usable) == own.verify or len(verified) == TRIES * own.verify:
            break
        if (layout.tensor_size, layout.stage, layout.offload) not in usable:
            line = line_of(layout, settings, own.cluster, own.nodes * cluster.gpus_per_node)
            verified[layout] = line.at(settings.model.num_layers)
            if verified[layout].device_peak_bytes <= cluster.gpu_memory_bytes:
                usable[layout.tensor_size, layout.stage, layout.offload] = layout
    return verified, list(usable.values())


def say_largest(own: argparse.Namespace, settings: Settings, cluster: ClusterSpec, console: Console) -> list[str]:
    """Shows how deep the model may be in the roomiest layouts; returns the options of the deepest by dry run."""
    world_size = own.nodes * cluster.gpus_per_node
    table = Table(title=f"The most layers of {settings.model.hidden_size}", title_justify="left")
    table.add_column("layout", no_wrap=True)
    for heading in ("closed forms", "dry run", "parameters", "GB"):
        table.add_column(heading, justify="right")
    deepest: dict[Layout, int] = {}
    for promised, layout in roomiest(settings, cluster, world_size)[: own.verify]:
        # Of many micro-batches the second needs as much memory as any after it.
        batch = min(settings.train.global_batch_size, 2 * layout.micro_batch_size * world_size // layout.tensor_size)
        brief = replace(settings, train=replace(settings.train, global_batch_size=batch))
        line = line_of(layout, brief, own.cluster, world_size)
        deepest[layout] = line.deepest(cluster.gpu_memory_bytes, cluster.host_memory_gb * 1e9 / cluster.gpus_per_node)
        there = line.at(deepest[layout])
        figures = f"{there.parameters / 1e9:.1f}B", f"{there.device_peak_bytes / 1e9:.1f}"
        table.add_row(describe(layout), str(promised), str(deepest[layout]), *figures)
    console.print(table)
    best = max(deepest, key=lambda layout: deepest[layout])
    console.print(f"{deepest[best]} layers of {settings.model.hidden_size} are the most that fit, by dry run")
    return [f"--model.num_layers={deepest[best]}", *best.options(settings.train.global_batch_size)]


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
