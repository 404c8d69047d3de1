"""Layouts that a run could use, and the memory and time that closed forms predict for each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpt.model.flops import hardware_flops
from gpt.model.transformer import ModelConfig
from gpt.planner.activation_store import parameters_of_rank, workload_of
from gpt.settings import Settings
from parallel.launch.cluster import ClusterSpec
from zero.activations.choice import (
    Hardware,
    Workload,
    bytes_per_sequence,
    exposed_seconds,
    model_parallel_volume,
)
from zero.activations.stores import STORES, StoreName
from zero.config import ZeroConfig
from zero.formulas import memory, traffic
from zero.formulas.memory import ModelStates, PlacedStates
from zero.offload.placement import Mode
from zero.stage import STAGES, Lifetime

ASSUMED_PEAK_FRACTION = 0.5  # fraction of the peak rate that computation is assumed to reach
USABLE_MEMORY_FRACTION = 0.97  # of a GPU's memory; the rest is for small allocations, which closed forms leave out
MAX_MICRO_BATCH = 128


@dataclass(frozen=True)
class CandidateLayout:
    """The settings that divide a run over its ranks and place its states, as the planner varies them."""

    tensor_size: int
    stage: int
    store: StoreName
    micro_batch_size: int
    offload: Mode = "accelerator"

    @property
    def family(self) -> tuple[int, int, str, str]:
        """The settings other than the micro-batch size."""
        return self.tensor_size, self.stage, self.store, self.offload

    def options(self, global_batch_size: int) -> list[str]:
        """Return the options of the training program that select this layout."""
        return [
            f"--parallel.tensor_size={self.tensor_size}",
            f"--zero.stage={self.stage}",
            f"--activations.store={self.store}",
            f"--offload.mode={self.offload}",
            f"--train.micro_batch_size={self.micro_batch_size}",
            f"--train.global_batch_size={global_batch_size}",
        ]

    def __str__(self) -> str:
        offload = ", offload" if self.offload == "host" else ""
        return (
            f"tensor {self.tensor_size}, stage {self.stage}, {self.store}, micro-batch {self.micro_batch_size}{offload}"
        )


@dataclass(frozen=True)
class Prediction:
    """The memory and time of one step with a layout, by closed forms."""

    layout: CandidateLayout
    device_bytes: float  # of one rank
    host_bytes: float  # of all ranks of a node
    seconds: float
    num_micro_batches: int


def predict(layout: CandidateLayout, settings: Settings, cluster: ClusterSpec, world_size: int) -> Prediction | None:
    """Return the prediction, or None if the layout does not divide the world, the global batch or the model."""
    model, train = settings.model, settings.train
    data_size, uneven = divmod(world_size, layout.tensor_size)
    num_micro_batches, rest = divmod(train.global_batch_size, layout.micro_batch_size * data_size)
    indivisible = model.num_heads % layout.tensor_size + model.padded_vocab_size % layout.tensor_size
    if uneven or rest or not num_micro_batches or indivisible:
        return None
    work = workload(layout, settings, data_size, num_micro_batches)
    device_bytes_per_sequence = bytes_per_sequence(work, layout.store)
    checkpoints_on_host = 0.0
    if layout.store == "partition_host":
        checkpoints_on_host = work.checkpoint_bytes / layout.tensor_size * work.b
    states_on_host = model_states(layout, settings, data_size).host
    return Prediction(
        layout,
        work.state_bytes + device_bytes_per_sequence * work.b,
        (checkpoints_on_host + states_on_host.total) * cluster.gpus_per_node,
        num_micro_batches * micro_batch_seconds(work, layout, model, cluster)
        + offload_seconds(states_on_host, train.dtype.itemsize, num_micro_batches, cluster),
        num_micro_batches,
    )


def model_states(layout: CandidateLayout, settings: Settings, data_size: int) -> PlacedStates:
    """Return the bytes of one rank's model states on the accelerator and on the host."""
    zero = zero_of(layout, settings, data_size)
    policy, dtype = zero.policy, settings.train.dtype
    num_parameters = parameters_of_rank(settings.model, layout.tensor_size)
    gradient_bytes = zero.gradient_types(dtype).accumulate.itemsize
    states = memory.formula(policy, num_parameters, data_size, dtype.itemsize, gradient_bytes=gradient_bytes)
    offloaded = replace(settings.offload, mode=layout.offload).offloaded_states
    return memory.placed(states, policy, data_size, offloaded)


def zero_of(layout: CandidateLayout, settings: Settings, data_size: int) -> ZeroConfig:
    """Return the settings of ZeRO with a layout, and the types of gradients that null stands for."""
    train = replace(settings.train, micro_batch_size=layout.micro_batch_size)
    chosen = replace(settings, train=train, zero=replace(settings.zero, stage=layout.stage))
    return chosen.with_gradient_types(data_size).zero


def offload_seconds(on_host: ModelStates, itemsize: int, num_micro_batches: int, cluster: ClusterSpec) -> float:
    """Return the time that offloaded states add to one step if nothing overlaps.

    Gradients are copied to the host, and back if they accumulate over micro-batches. Parameters on the host are copied
    to the device for every forward and backward; otherwise the updated ones are copied there once. The update reads
    and writes master weights and moments on the host, and reads gradients.
    """
    copied = on_host.gradients * (2 * num_micro_batches - 1) + on_host.parameters * 2 * num_micro_batches
    copied += 0 if on_host.parameters else on_host.master * itemsize / 4
    updated = 2 * (on_host.master + on_host.moments) + on_host.gradients
    return copied / (cluster.host_gb_per_second * 1e9) + updated / (cluster.host_memory_rate_of_a_gpu * 1e9)


def workload(layout: CandidateLayout, settings: Settings, data_size: int, num_micro_batches: int) -> Workload:
    """Return the work of one rank on one micro-batch, including the memory of model states and buffers."""
    model, itemsize, zero = settings.model, settings.train.dtype.itemsize, zero_of(layout, settings, data_size)
    policy, reduced_bytes = zero.policy, zero.gradient_types(settings.train.dtype).reduce.itemsize
    num_parameters = parameters_of_rank(model, layout.tensor_size)
    states = model_states(layout, settings, data_size).accelerator.total
    # Assumed: buffers of three buckets and, if parameters are transient, three layers unsharded at once.
    bucket = zero.chosen_bucket_numel(num_parameters, data_size, settings.train.dtype) * reduced_bytes
    is_transient = policy.full_params is Lifetime.TRANSIENT
    unsharded = 3 * itemsize * num_parameters / model.num_layers if is_transient else 0
    sent = traffic.step_bytes(
        policy, num_parameters * itemsize, data_size, num_micro_batches, num_parameters * reduced_bytes
    )
    return workload_of(
        model,
        b=layout.micro_batch_size,
        k=settings.activations.layers_per_checkpoint,
        N_m=layout.tensor_size,
        tensor_size=layout.tensor_size,
        itemsize=itemsize,
        state_bytes=states + 3 * bucket + unsharded,
        data_bytes=sent / num_micro_batches,
    )


def micro_batch_seconds(work: Workload, layout: CandidateLayout, model: ModelConfig, cluster: ClusterSpec) -> float:
    """Return the time of one micro-batch.

    It is the sum of three times: of the computation, of tensor-parallel all-reduces, and of the traffic of the
    activation store and the data axis that does not overlap the computation.
    """
    ranks_per_ring = min(layout.tensor_size, cluster.gpus_per_node)
    node_rate = cluster.node_gb_per_second * cluster.node_fraction / ranks_per_ring
    data_rate = min(node_rate, cluster.network_card_gb_per_second)
    flops_per_second = cluster.peak_half_tflops * ASSUMED_PEAK_FRACTION * 1e12
    computing = hardware_flops(model, work.b, "blocks") / layout.tensor_size / flops_per_second
    hardware = Hardware(
        None, flops_per_second / 1e12, cluster.intra_node_gb_per_second, data_rate, cluster.host_gb_per_second
    )
    has_tensor_ranks = layout.tensor_size > 1
    tensor_bytes = model_parallel_volume(work.b, work.s, work.h, work.L) * work.itemsize if has_tensor_ranks else 0
    return (
        computing
        + tensor_bytes / (cluster.intra_node_gb_per_second * 1e9)
        + work.b * exposed_seconds(work, layout.store, work.b, hardware)
    )


def candidate_layouts(gpus_per_node: int, global_batch_size: int, offload: Mode) -> Iterator[CandidateLayout]:
    """Yield every layout to consider; with offload.mode=auto, each with and without offload.

    The layouts of a family are in ascending order of micro-batch size.
    """
    modes: tuple[Mode, ...] = ("accelerator", "host") if offload == "auto" else (offload,)
    tensor_sizes = [2**n for n in range(20) if gpus_per_node % 2**n == 0]
    micro_batches = [b for b in range(1, min(global_batch_size, MAX_MICRO_BATCH) + 1) if b <= 4 or b % 4 == 0]
    for tensor_size in tensor_sizes:
        for stage in STAGES:
            for store in STORES:
                if store == "partition" and tensor_size == 1:
                    continue
                for mode in modes:
                    for micro_batch in micro_batches:
                        yield CandidateLayout(tensor_size, stage, store, micro_batch, mode)


def usable_bytes(cluster: ClusterSpec) -> float:
    """Return the memory of a GPU that model states and activations may fill."""
    return USABLE_MEMORY_FRACTION * cluster.gpu_memory_bytes


def fits(prediction: Prediction, cluster: ClusterSpec) -> bool:
    """Return True if the predicted memory fits a GPU and the host of a node."""
    on_device = prediction.device_bytes <= usable_bytes(cluster)
    return on_device and prediction.host_bytes <= cluster.host_memory_gb * 1e9
