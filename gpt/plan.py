"""The planner: which layout a model should train in on a cluster, or which model is the largest that fits.

    python -m gpt.plan --cluster configs/clusters/dgx-2.yaml --nodes 25 --config FILE [--largest]

Every layout is judged by the closed forms; the best few are then run dry, two shallow steps each.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from gpt.choose_store import parameters_of_rank, workload_of
from gpt.depth import Estimate, draw_line
from gpt.flops import hardware_flops
from gpt.model import ModelConfig
from gpt.settings import Settings, parse_settings
from parallel.cluster import ClusterSpec
from parallel.errors import ConfigError
from zero import memory, traffic
from zero.activation_choice import Hardware, StoreName, Workload, bytes_per_sequence, exposed_seconds
from zero.activation_choice import model_parallel_volume as tensor_volume
from zero.stage import STAGES, Lifetime

STORES: tuple[StoreName, ...] = ("keep", "partition", "partition_host")
REALISTIC_FRACTION = 0.5  # of the peak, until a dry run knows better
USABLE_SHARE = 0.97  # of the memory: the closed forms leave out what is small


@dataclass(frozen=True)
class Layout:
    tensor_size: int
    stage: int
    store: StoreName
    micro_batch_size: int

    def options(self, global_batch_size: int) -> list[str]:
        return [
            f"--parallel.tensor_size={self.tensor_size}",
            f"--zero.stage={self.stage}",
            f"--activations.store={self.store}",
            f"--train.micro_batch_size={self.micro_batch_size}",
            f"--train.global_batch_size={global_batch_size}",
        ]


@dataclass(frozen=True)
class Judgement:
    """By the closed forms, of one rank and one step."""

    layout: Layout
    memory_bytes: float
    host_bytes: float
    seconds: float
    num_micro_batches: int


def judge(layout: Layout, settings: Settings, cluster: ClusterSpec, world_size: int) -> Judgement | None:
    """None where the global batch or the model cannot be divided so."""
    model, train = settings.model, settings.train
    data_size, uneven = divmod(world_size, layout.tensor_size)
    num_micro_batches, rest = divmod(train.global_batch_size, layout.micro_batch_size * data_size)
    heads = model.num_heads % layout.tensor_size + model.padded_vocab_size % layout.tensor_size
    if uneven or rest or not num_micro_batches or heads:
        return None
    work = workload(layout, settings, data_size, num_micro_batches)
    per_sequence = bytes_per_sequence(work, layout.store)
    parts = layout.tensor_size if layout.store == "partition_host" else 1
    on_host = work.checkpoint_bytes / parts * work.b if layout.store == "partition_host" else 0.0
    return Judgement(
        layout,
        work.state_bytes + per_sequence * work.b,
        on_host * cluster.gpus_per_node,
        num_micro_batches * seconds_of(work, layout, model, cluster),
        num_micro_batches,
    )


def workload(layout: Layout, settings: Settings, data_size: int, num_micro_batches: int) -> Workload:
    model, itemsize, answers = settings.model, settings.train.dtype.itemsize, STAGES[layout.stage]
    num_parameters = parameters_of_rank(model, layout.tensor_size)
    states = memory.formula(answers, num_parameters, data_size, itemsize).total
    window = (settings.zero.window_numel or num_parameters) * itemsize
    is_gathered = answers.full_params is Lifetime.TRANSIENT
    gathered = 3 * itemsize * num_parameters / model.num_layers if is_gathered else 0
    sent = traffic.step_bytes(answers, num_parameters * itemsize, data_size, num_micro_batches)
    return workload_of(
        settings,
        b=layout.micro_batch_size,
        N_m=layout.tensor_size,
        tensor_size=layout.tensor_size,
        state_bytes=states + 3 * window + gathered,
        data_bytes=sent / num_micro_batches,
    )


def seconds_of(work: Workload, layout: Layout, model: ModelConfig, cluster: ClusterSpec) -> float:
    """Of one micro-batch: computation, tensor-parallel all-reduces, and what the store and the data axis leave bare."""
    share = min(layout.tensor_size, cluster.gpus_per_node)
    data_rate = min(cluster.node_gb_per_second * cluster.node_fraction / share, cluster.network_card_gb_per_second)
    rate = cluster.peak_half_tflops * REALISTIC_FRACTION * 1e12
    computing = hardware_flops(model, work.b, "blocks") / layout.tensor_size / rate
    hardware = Hardware(None, rate / 1e12, cluster.intra_node_gb_per_second, data_rate, cluster.host_gb_per_second)
    is_alone = layout.tensor_size == 1
    volume = 0 if is_alone else tensor_volume(work.b, work.s, work.h, work.L) * work.itemsize
    return (
        computing
        + volume / (cluster.intra_node_gb_per_second * 1e9)
        + work.b * exposed_seconds(work, layout.store, work.b, hardware)
    )


def layouts(cluster: ClusterSpec, largest_micro_batch: int) -> Iterator[Layout]:
    tensor_sizes = [2**n for n in range(20) if cluster.gpus_per_node % 2**n == 0]
    micro_batches = [b for b in range(1, largest_micro_batch + 1) if b <= 4 or b % 4 == 0]
    for tensor_size in tensor_sizes:
        for stage in STAGES:
            for store in STORES:
                if store == "partition" and tensor_size == 1:
                    continue
                for micro_batch in micro_batches:
                    yield Layout(tensor_size, stage, store, micro_batch)


@dataclass(frozen=True)
class Plan:
    fitting: list[Judgement]  # the fastest first
    nearest: list[Judgement]  # of those that don't fit, for each stage and store


def make_plan(settings: Settings, cluster: ClusterSpec, world_size: int) -> Plan:
    """Raises ConfigError where no layout divides the world and the batch, or none fits, with how much is missing."""
    largest = min(settings.train.global_batch_size, 128)
    judged = [judge(layout, settings, cluster, world_size) for layout in layouts(cluster, largest)]
    possible = [found for found in judged if found is not None]
    if not possible:
        raise ConfigError(
            f"no layout divides train.global_batch_size={settings.train.global_batch_size} sequences over "
            f"{world_size} ranks; choose a multiple of {world_size}"
        )
    room = USABLE_SHARE * cluster.gpu_memory_bytes
    fitting = [f for f in possible if f.memory_bytes <= room and f.host_bytes <= cluster.host_memory_gb * 1e9]
    if not fitting:
        smallest = min(possible, key=lambda found: found.memory_bytes)
        raise ConfigError(
            f"the model fits nowhere on {world_size} GPUs: the leanest layout ({describe(smallest.layout)}) needs "
            f"{smallest.memory_bytes / 1e9:.1f} GB of {room / 1e9:.1f}, {(smallest.memory_bytes - room) / 1e9:.1f} too "
            "much; take more nodes or a smaller model"
        )
    best: dict[tuple[int, int, str], Judgement] = {}
    for found in sorted(fitting, key=lambda found: found.seconds):
        best.setdefault((found.layout.tensor_size, found.layout.stage, found.layout.store), found)
    kinds = {(f.layout.tensor_size, f.layout.stage, f.layout.store) for f in possible} - set(best)
    nearest = [
        min(
            (f for f in possible if (f.layout.tensor_size, f.layout.stage, f.layout.store) == kind),
            key=lambda found: found.memory_bytes,
        )
        for kind in sorted(kinds)
    ]
    return Plan(list(best.values()), nearest)


def verify(judgement: Judgement, settings: Settings, cluster_file: str, world_size: int) -> Estimate:
    layout = judgement.layout
    chosen = replace(
        settings,
        parallel=replace(settings.parallel, tensor_size=layout.tensor_size),
        zero=replace(settings.zero, stage=layout.stage),
        activations=replace(settings.activations, store=layout.store),
        train=replace(settings.train, micro_batch_size=layout.micro_batch_size),
        dry_run=replace(settings.dry_run, world_size=world_size, cluster=cluster_file),
    )
    return draw_line(chosen, ClusterSpec.load(cluster_file)).at(settings.model.num_layers)


def largest_model(settings: Settings, cluster: ClusterSpec, world_size: int) -> int:
    """Layers of the settings' width. Raises ConfigError where not even one fits."""

    def fits(num_layers: int) -> bool:
        deep = replace(settings, model=replace(settings.model, num_layers=num_layers))
        try:
            make_plan(deep, cluster, world_size)
        except ConfigError:
            if num_layers == 1:
                raise
            return False
        return True

    low, high = 1, 2
    fits(1)
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def describe(layout: Layout) -> str:
    return f"tensor {layout.tensor_size}, stage {layout.stage}, {layout.store}, micro-batch {layout.micro_batch_size}"


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
    parser = argparse.ArgumentParser(prog="python -m gpt.plan", description=__doc__)
    parser.add_argument("--cluster", required=True, help="file of the machine, such as configs/clusters/dgx-2.yaml")
    parser.add_argument("--nodes", type=int, required=True, help="nodes of it")
    parser.add_argument("--largest", action="store_true", help="find the largest number of layers that fits")
    parser.add_argument("--verify", type=int, default=3, help="layouts to run dry")
    own, others = parser.parse_known_args(arguments)
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 120)
    settings, cluster = parse_settings(others), ClusterSpec.load(own.cluster)
    if own.nodes < 1 or own.verify < 1:
        raise ConfigError(f"--nodes={own.nodes} or --verify={own.verify} is below 1; choose 1 or more")
    world_size = own.nodes * cluster.gpus_per_node
    if own.largest:
        num_layers = largest_model(settings, cluster, world_size)
        settings = replace(settings, model=replace(settings.model, num_layers=num_layers))
        console.print(f"{num_layers} layers of {settings.model.hidden_size} are the most that fit")
    plan = make_plan(settings, cluster, world_size)
    verified = {found.layout: verify(found, settings, own.cluster, world_size) for found in plan.fitting[: own.verify]}
    console.print(plan_table(plan, verified, settings, cluster))
    room = USABLE_SHARE * cluster.gpu_memory_bytes
    for found in plan.nearest:
        needed, node = found.memory_bytes - room, found.host_bytes / 1e9 - cluster.host_memory_gb
        reason = f"{needed / 1e9:.1f} GB too much on a GPU" if needed > 0 else f"{node:.0f} GB too much on a host"
        console.print(f"does not fit: {describe(found.layout)}: {reason}")
    usable = [x for x in verified if verified[x].device_peak_bytes <= cluster.gpu_memory_bytes]
    if not usable:
        raise ConfigError(f"none of the {len(verified)} best layouts fits in a dry run; raise --verify={own.verify}")
    best = min(usable, key=lambda layout: verified[layout].seconds)
    options = " ".join(best.options(settings.train.global_batch_size))
    layers = f" --model.num_layers={settings.model.num_layers}" if own.largest else ""
    launch = f"torchrun --nnodes={own.nodes} --nproc_per_node={cluster.gpus_per_node} --rdzv-endpoint=HOST:29500"
    console.print(f"\n{launch} \\\n    pretrain_gpt.py {' '.join(others)}{layers} {options}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
