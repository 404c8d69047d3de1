"""Layouts that a run could use, and the memory and time that closed forms predict for each."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, Self, get_args

from gpt.builder.activation_store import block_sum_bytes, model_states, sent_bytes, workload
from gpt.builder.closed_forms import parameters_of_rank
from gpt.builder.train_state import check_mesh
from gpt.kernels.documents import suits_kernel
from gpt.settings.settings import Settings
from gpt.shape.flops import hardware_flops
from lab.dryrun.costs.collectives import MeshShape, group_along
from lab.measure.cluster import ClusterSpec
from parallel.comm_log import CommLog
from parallel.mesh import HALF_TYPES, Axis, Mesh
from parallel.validation.errors import ConfigError
from zero.activations.choice import Hardware, Workload, bytes_on_device, exposed_seconds, model_parallel_volume
from zero.activations.stores import STORES, StoreName
from zero.core.buckets.reductions import MAX_IN_FLIGHT
from zero.core.partition.config import NUM_STAGED, Accumulate
from zero.core.partition.stage import STAGES, Division, Lifetime
from zero.formulas.memory import ModelStates
from zero.formulas.traffic import axis_bytes, axis_sizes
from zero.settings.config import Mode, OptimizerOver

ASSUMED_PEAK_FRACTION = 0.5  # fraction of the peak rate that computation is assumed to reach
MAX_MICRO_BATCH = 128
Store = Literal["none", "selective", StoreName]  # of activations.store: all but auto
FIELDS = {  # {setting: field of a layout}
    "parallel.tensor_size": "tensor_size",
    "parallel.shard_size": "shard_size",
    "zero.stage": "stage",
    "zero.optimizer_over": "optimizer_over",
    "zero.accumulate": "accumulate",
    "activations.store": "store",
    "offload.mode": "offload",
    "train.micro_batch_size": "micro_batch_size",
}


@dataclass(frozen=True)
class CandidateLayout:
    """The settings that divide a run over its ranks and place its states, as the planner varies them."""

    tensor_size: int
    stage: int
    store: Store
    micro_batch_size: int
    offload: Mode = "accelerator"
    accumulate: Accumulate = "reduce"
    shard_size: int | None = None  # of groups inside a node
    optimizer_over: OptimizerOver = "group"

    @property
    def partition(self) -> tuple[int, int, str, int, str]:
        """The settings that divide the model states over the ranks and place them."""
        return self.tensor_size, self.stage, self.offload, self.shard_size or 0, self.optimizer_over

    @property
    def family(self) -> tuple:
        """The settings other than the micro-batch size."""
        return *self.partition, self.store, self.accumulate

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the layout of settings, whose store and mode of offload are not `auto`."""
        return cls(**{field: value_of(settings, name) for name, field in FIELDS.items()})

    def applied_to(self, settings: Settings) -> Settings:
        """Return the settings with this layout. Raise ConfigError if they refuse it."""
        return with_values(settings, {name: getattr(self, field) for name, field in FIELDS.items()})

    @property
    def simplicity(self) -> tuple[int, int]:
        """The states that are divided or offloaded, and the tensor size: of layouts with equal room, the least wins."""
        policy = STAGES[self.stage]
        states = policy.optimizer, policy.gradients, policy.parameters
        num_divided = sum(division is not Division.NONE for division in states)
        return num_divided + (self.offload != "accelerator"), self.tensor_size

    def __str__(self) -> str:
        return f"{self.division}, micro-batch {self.micro_batch_size}"

    @property
    def division(self) -> str:
        """All but the micro-batch, in words."""
        parts = {
            f"tensor {self.tensor_size}": True,
            f"stage {self.stage}": True,
            f"groups of {self.shard_size}": self.shard_size,
            "optimizer over all": self.optimizer_over == "all",
            self.store: True,
            "local": self.accumulate == "local",
            "offload": self.offload == "host",
        }
        return ", ".join(part for part, applies in parts.items() if applies)


def value_of(settings: Settings, name: str) -> Any:
    """Return the value of a setting by its dotted name, such as zero.stage."""
    group, _, field = name.partition(".")
    return getattr(getattr(settings, group), field)


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the settings with other values, {dotted name: value}. Raise ConfigError if they are refused."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        group, _, field = name.partition(".")
        groups.setdefault(group, {})[field] = value
    return replace(settings, **{group: replace(getattr(settings, group), **own) for group, own in groups.items()})


@dataclass(frozen=True)
class Prediction:
    """The memory and the bounds of the time of one step with a layout, by closed forms."""

    layout: CandidateLayout
    device_bytes: float  # of one rank
    host_bytes: float  # of all ranks of a node
    seconds: float  # if no traffic of the data axis is hidden
    num_micro_batches: int
    overlapped_seconds: float  # if as much of it is hidden as computation lasts; `seconds` if nothing overlaps


def predict(layout: CandidateLayout, settings: Settings, cluster: ClusterSpec, world_size: int) -> Prediction | None:
    """Return the prediction, or None if a run refuses the layout.

    It is None too for a single group, and for local accumulation of a single micro-batch, which is nothing.
    """
    train, context_size = settings.train, settings.parallel.context_size
    data_size, uneven = divmod(world_size, layout.tensor_size)
    group_size = layout.shard_size or data_size
    is_one_group = layout.shard_size is not None and group_size >= data_size
    if uneven or is_one_group or data_size % group_size or group_size % context_size:
        return None
    try:
        settings = layout.applied_to(settings)
        check_mesh(settings, mesh_of(layout, data_size, context_size))
        settings = settings.with_gradient_types(data_size)
    except ConfigError:
        return None
    num_micro_batches = settings.train.num_micro_batches(data_size // context_size)
    if layout.accumulate == "local" and num_micro_batches == 1:
        return None
    work, on_host = planned_workload(settings, data_size), model_states(settings, data_size).host
    checkpoints_on_host = work.checkpoint_bytes * work.b / layout.tensor_size * (layout.store == "partition_host")
    most, least = step_seconds(work, settings, cluster, world_size)
    offloading = offload_seconds(on_host, train.dtype.itemsize, num_micro_batches, cluster)
    with_audits = 1 + settings.audit_share(world_size)
    return Prediction(
        layout,
        work.state_bytes + activation_bytes(work, settings) * work.b,
        (checkpoints_on_host + on_host.total) * cluster.gpus_per_node,
        (most + offloading) * with_audits,
        num_micro_batches,
        (least + offloading) * with_audits,
    )


def mesh_of(layout: CandidateLayout, data_size: int, context_size: int) -> Mesh:
    """Return the sizes of a layout as a mesh that cannot communicate."""
    log = CommLog()
    data, tensor, context = (
        Axis(name, size, 0, log)
        for name, size in (("data", data_size), ("tensor", layout.tensor_size), ("context", context_size))
    )
    if size := layout.shard_size:
        data = replace(data, parts=(Axis("shard", size, 0, log), Axis("replica", data_size // size, 0, log)))
    return Mesh(data, tensor, log, context)


def hardware_of(cluster: ClusterSpec) -> Hardware:
    """Return the device and the links of a cluster, as programs reach them."""
    return Hardware(
        memory_gb=cluster.gpu_memory_bytes / 1e9,
        tflops=cluster.peak_half_tflops * cluster.gemm_fraction,
        tensor_gb_per_second=cluster.intra_node_gb_per_second,
        host_gb_per_second=cluster.host_gb_per_second,
    )


def planned_workload(settings: Settings, data_size: int) -> Workload:
    """Return the work of one rank on one micro-batch, including the memory of model states and buffers.

    Assumed: buffers of three buckets and, if parameters are transient, three layers unsharded at once. What a rank
    adds in fp32 it receives into as many buffers: buckets inside a group, and shards of them between groups. Sums of
    leaves are received one after the other.
    """
    zero, dtype, tensor_size = settings.zero, settings.train.dtype, settings.parallel.tensor_size
    num_parameters = parameters_of_rank(settings.model, tensor_size)
    accumulate, reduce_dtype = zero.gradient_types(dtype)
    bucket = zero.chosen_bucket_numel(num_parameters, data_size, dtype) * reduce_dtype.itemsize
    received = 0.0
    inner, outer = axis_sizes(zero.policy, data_size, settings.parallel.shard_size)
    num_received = MAX_IN_FLIGHT if zero.overlap else 1
    if zero.fixes_order:
        of_sums = bucket / reduce_dtype.itemsize * accumulate.itemsize / inner
        received = num_received * bucket * (inner > 1) + of_sums * (outer > 1)
    elif zero.sum_over_ranks == "fp32" and reduce_dtype in HALF_TYPES:
        received = num_received * bucket * ((inner > 1) + (outer > 1) / inner)
    is_transient = zero.policy.full_params is Lifetime.TRANSIENT
    unsharded = 3 * dtype.itemsize * num_parameters / settings.model.num_layers if is_transient else 0
    states = model_states(settings, data_size).accelerator.total
    held = states + block_sum_bytes(settings, data_size) + NUM_STAGED * bucket + received + unsharded
    return replace(workload(settings, data_size, tensor_size), state_bytes=held)


def activation_bytes(work: Workload, settings: Settings) -> float:
    """Return the bytes that the activations of one sequence need on the device.

    Until its backward a block keeps, for every token, 4 h elements (inputs of norms and of the first products) that the
    tensor ranks divide only with sequence parallelism, and others that they divide (`ModelConfig.block_width`); with
    dropout also two masks of h. Math attention keeps its weights, with dropout in three versions, unless only these are
    computed again. With checkpoints, only the blocks of one group are kept at the same time. Backward needs another
    4 h, the logits, and their gradient. A mask of documents, which all layers share, has s^2 elements.
    """
    model, store, tensor_size = settings.model, settings.activations.store, settings.parallel.tensor_size
    copies = 1 if settings.parallel.sequence_parallel else tensor_size
    kept = (6 if model.dropout else 4) * copies * work.h + work.block_width
    if settings.activations.recomputes != "attention" and model.attention == "math":
        kept += (3 if model.dropout else 1) * model.num_heads * work.s
    num_kept = work.L if store not in STORES else min(work.k, work.L)
    stored = bytes_on_device(work, store) if store in STORES else 0.0
    elements = kept * num_kept + 4 * work.h + 2 * work.vocab_size
    mask = settings.data.mask_documents and not suits_kernel(
        model.attention, model.head_size, model.dropout, settings.train.dtype
    )
    stored += work.itemsize * model.seq_length**2 * mask  # every rank has all of it
    return stored + work.itemsize * work.s * elements / tensor_size


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


def step_seconds(work: Workload, settings: Settings, cluster: ClusterSpec, world_size: int) -> tuple[float, float]:
    """Return the longest and the shortest time of one step.

    Either is the sum, over micro-batches, of the computation and the traffic of the data axis, tensor-parallel
    all-reduces, and what the activation store sends that does not overlap. The shortest has only the longer one of
    computation and data axis if these may overlap; what is sent once a step overlaps one micro-batch.
    """
    model, tensor_size, store = settings.model, settings.parallel.tensor_size, settings.activations.store
    recomputes = settings.activations.recomputes
    flops_per_second = cluster.peak_half_tflops * ASSUMED_PEAK_FRACTION * 1e12
    num_ranks = tensor_size * model.seq_length // work.s  # that share the sequences
    computing = hardware_flops(model, work.b, recomputes) / num_ranks / flops_per_second
    data_size = world_size // tensor_size
    once, twice = (data_seconds(settings, cluster, data_size, number) for number in (1, 2))
    sending = twice - once  # in each further micro-batch
    hardware = replace(hardware_of(cluster), tflops=flops_per_second / 1e12)
    of_three = 3 if recomputes == "blocks" else 2  # two all-reduces each in forward, backward, and recomputation
    tensor_bytes = model_parallel_volume(work.b, work.s, work.h, work.L) * work.itemsize * of_three / 3
    communicated = store if store in STORES else "keep"  # without checkpoints, none are communicated
    others = tensor_bytes * (tensor_size > 1) / (cluster.intra_node_gb_per_second * 1e9)
    others += work.b * exposed_seconds(replace(work, data_bytes=0.0), communicated, work.b, hardware)
    num_further = settings.train.num_micro_batches(data_size // settings.parallel.context_size) - 1
    all_others = (num_further + 1) * others
    most = computing + once + num_further * (computing + sending) + all_others
    least = max(computing, once) + num_further * max(computing, sending) + all_others
    return most, least if settings.zero.overlap else most


def data_seconds(settings: Settings, cluster: ClusterSpec, data_size: int, num_micro_batches: int) -> float:
    """Return the time of a step's traffic along the data axis, inside groups and then between them."""
    tensor_size, policy = settings.parallel.tensor_size, settings.zero.policy
    sizes = axis_sizes(policy, data_size, settings.parallel.shard_size)
    shape = MeshShape(data_size, tensor_size, sizes[0])
    inner, outer = (
        group_along(axis, size, cluster, shape) for axis, size in zip(("shard", "replica"), sizes, strict=True)
    )
    inside, between = sent_bytes(settings, data_size, num_micro_batches)
    seconds = inside / inner.bytes_per_second + between / outer.bytes_per_second
    if settings.zero.fixes_order:  # by an all-to-all inside a group
        exchange = group_along("shard", sizes[0], cluster, shape, is_exchange=True)
        num_bytes = parameters_of_rank(settings.model, tensor_size) * settings.train.dtype.itemsize
        gathered, _ = axis_bytes(policy, num_bytes, sizes, num_micro_batches, gradient_bytes=(0.0, 0.0))
        seconds += (inside - gathered) * (
            exchange.exchange_factor / exchange.bytes_per_second - 1 / inner.bytes_per_second
        )
    return seconds


def candidate_layouts(gpus_per_node: int, settings: Settings, fixed: Collection[str] = ()) -> Iterator[CandidateLayout]:
    """Yield every layout to consider; with offload.mode=auto, each with and without offload.

    Settings that are `fixed`, names of FIELDS, have their value in all of them. The layouts of a family are in
    ascending order of micro-batch size.
    """

    def values(name: str, searched: Iterable[Any]) -> list[Any]:
        return [value_of(settings, name)] if name in fixed else list(searched)

    mode, batch = settings.offload.mode, settings.train.global_batch_size
    modes: tuple[Mode, ...] = ("accelerator", "host") if mode == "auto" else (mode,)
    micro_batches = values("train.micro_batch_size", (b for b in range(1, MAX_MICRO_BATCH + 1) if batch % b == 0))
    division_names = "zero.accumulate", "parallel.shard_size", "zero.optimizer_over"
    tensors = values("parallel.tensor_size", tensor_sizes(gpus_per_node))
    stores = values("activations.store", ("none",) if settings.activations.budget else ("none", "selective", *STORES))
    for tensor_size, stage in product(tensors, values("zero.stage", STAGES)):
        # Left out: stage 2 that accumulates locally, which is stage 1, and groups that accumulate locally, since
        # reductions inside a node are fast.
        policy = STAGES[stage]
        is_stage = replace(policy, gradients=Division.NONE) in STAGES.values()
        sums: tuple[Accumulate, ...] = ("reduce",) if is_stage else get_args(Accumulate)
        divisions: list[tuple] = [(accumulate, None, "group") for accumulate in sums]
        node_size = gpus_per_node // tensor_size
        if policy.gradients is not Division.NONE and node_size > 1:
            divisions += [("reduce", node_size, over) for over in get_args(OptimizerOver)]
        kept = dict.fromkeys(
            tuple(values(name, [value])[0] for name, value in zip(division_names, division, strict=True))
            for division in divisions
        )
        for store, mode, division, micro_batch in product(stores, modes, kept, micro_batches):
            yield CandidateLayout(tensor_size, stage, store, micro_batch, mode, *division)


def tensor_sizes(gpus_per_node: int) -> list[int]:
    """Return the sizes of the tensor axis that are searched."""
    return [2**n for n in range(20) if gpus_per_node % 2**n == 0]


def fits(prediction: Prediction, cluster: ClusterSpec) -> bool:
    """Return True if the predicted memory fits a GPU and the host of a node."""
    return cluster.holds(prediction.device_bytes, prediction.host_bytes)
