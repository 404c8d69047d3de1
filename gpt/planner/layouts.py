"""Layouts of a run, and what the closed forms promise of each: memory and time of one rank and step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpt.model.flops import hardware_flops
from gpt.model.transformer import ModelConfig
from gpt.planner.activation_store import parameters_of_rank, workload_of
from gpt.settings import Settings
from parallel.launch.cluster import ClusterSpec
from zero.activations.choice import Hardware, Workload, bytes_per_sequence, exposed_seconds
from zero.activations.choice import model_parallel_volume as tensor_volume
from zero.activations.stores import STORES, StoreName
from zero.formulas import memory, traffic
from zero.formulas.memory import ModelStates, PlacedStates
from zero.offload.placement import Mode
from zero.stage import STAGES, Lifetime

REALISTIC_FRACTION = 0.5  # of the peak, until a dry run knows better
USABLE_SHARE = 0.97  # of the memory: the closed forms leave out what is small
LARGEST_MICRO_BATCH = 128


@dataclass(frozen=True)
class Layout:
    tensor_size: int
    stage: int
    store: StoreName
    micro_batch_size: int
    offload: Mode = "accelerator"

    @property
    def kind(self) -> tuple[int, int, str, str]:
        """All but the size of a micro-batch."""
        return self.tensor_size, self.stage, self.store, self.offload

    def options(self, global_batch_size: int) -> list[str]:
        return [
            f"--parallel.tensor_size={self.tensor_size}",
            f"--zero.stage={self.stage}",
            f"--activations.store={self.store}",
            f"--offload.mode={self.offload}",
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
    states_on_host = model_states(layout, settings, data_size).host
    return Judgement(
        layout,
        work.state_bytes + per_sequence * work.b,
        (on_host + states_on_host.total) * cluster.gpus_per_node,
        num_micro_batches * seconds_of(work, layout, model, cluster)
        + offload_seconds(states_on_host, train.dtype.itemsize, num_micro_batches, cluster),
        num_micro_batches,
    )


def model_states(layout: Layout, settings: Settings, data_size: int) -> PlacedStates:
    policy = settings.zero.at_stage(layout.stage)
    num_parameters = parameters_of_rank(settings.model, layout.tensor_size)
    states = memory.formula(policy, num_parameters, data_size, settings.train.dtype.itemsize)
    leaves = replace(settings.offload, mode=layout.offload).offloaded_states
    return memory.placed(states, policy, data_size, leaves)


def offload_seconds(on_host: ModelStates, itemsize: int, num_micro_batches: int, cluster: ClusterSpec) -> float:
    """Of one step, as if nothing were hidden: copies of gradients (back and forth where they add up), of weights for
    forward and backward where they wait on the host, and an update that reads and writes all it has there.
    """
    copied = on_host.gradients * (2 * num_micro_batches - 1) + on_host.parameters * 2 * num_micro_batches
    copied += 0 if on_host.parameters else on_host.master * itemsize / 4
    updated = 2 * (on_host.master + on_host.moments) + on_host.gradients
    return copied / (cluster.host_gb_per_second * 1e9) + updated / (cluster.host_memory_rate_of_a_gpu * 1e9)


def workload(layout: Layout, settings: Settings, data_size: int, num_micro_batches: int) -> Workload:
    model, itemsize, policy = settings.model, settings.train.dtype.itemsize, settings.zero.at_stage(layout.stage)
    num_parameters = parameters_of_rank(model, layout.tensor_size)
    states = model_states(layout, settings, data_size).accelerator.total
    bucket = (settings.zero.bucket_numel or num_parameters) * itemsize
    is_gathered = policy.full_params is Lifetime.TRANSIENT
    gathered = 3 * itemsize * num_parameters / model.num_layers if is_gathered else 0
    sent = traffic.step_bytes(policy, num_parameters * itemsize, data_size, num_micro_batches)
    return workload_of(
        model,
        b=layout.micro_batch_size,
        k=settings.activations.layers_per_checkpoint,
        N_m=layout.tensor_size,
        tensor_size=layout.tensor_size,
        itemsize=itemsize,
        state_bytes=states + 3 * bucket + gathered,
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


def layouts(cluster: ClusterSpec, settings: Settings) -> Iterator[Layout]:
    """With offload.mode=auto, with and without offload."""
    global_batch_size, mode = settings.train.global_batch_size, settings.offload.mode
    offloads: tuple[Mode, ...] = ("accelerator", "host") if mode == "auto" else (mode,)
    tensor_sizes = [2**n for n in range(20) if cluster.gpus_per_node % 2**n == 0]
    micro_batches = [b for b in range(1, min(global_batch_size, LARGEST_MICRO_BATCH) + 1) if b <= 4 or b % 4 == 0]
    for tensor_size in tensor_sizes:
        for stage in STAGES:
            for store in STORES:
                if store == "partition" and tensor_size == 1:
                    continue
                for offload in offloads:
                    for micro_batch in micro_batches:
                        yield Layout(tensor_size, stage, store, micro_batch, offload)


def room_bytes(cluster: ClusterSpec) -> float:
    return USABLE_SHARE * cluster.gpu_memory_bytes


def has_room(judged: Judgement, cluster: ClusterSpec) -> bool:
    return judged.memory_bytes <= room_bytes(cluster) and judged.host_bytes <= cluster.host_memory_gb * 1e9


def describe(layout: Layout) -> str:
    offload = ", offload" if layout.offload == "host" else ""
    return (
        f"tensor {layout.tensor_size}, stage {layout.stage}, {layout.store}, micro-batch {layout.micro_batch_size}"
        f"{offload}"
    )
