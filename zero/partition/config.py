"""The settings of ZeRO."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch

from parallel.validation.errors import ConfigError
from parallel.validation.fields import NonNegative, Positive, Range, check_fields
from zero.partition.layout import ALIGNMENT, NORM_BLOCK
from zero.partition.stage import STAGES, Division, GradientTypes, Lifetime, ShardingPolicy

Accumulate = Literal["reduce", "local"]
OptimizerOver = Literal["group", "all"]
SumOverRanks = Literal["message", "fp32", "leaves"]
SMALLEST_BUCKET, NUMEL_PER_RANK = 2**25, 2**20
NUM_STAGED = 3  # buckets in a pool, at most: two are reduced while one is filled
LARGEST_POOL_BYTES = 1_600_000_000  # 5% of an accelerator of 32 GB
DtypeName = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[DtypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ZeroConfig:
    """The partition of model states over the data-parallel ranks, and the portions in which they are communicated."""

    stage: Annotated[int, Range(min(STAGES), max(STAGES))] = 2
    """0: plain data parallelism; 1: optimizer states are partitioned; 2: gradients too; 3: parameters too."""
    bucket_numel: Positive | Literal["auto"] | None = "auto"
    """C_B: the number of elements that are communicated, cast or summed at once, however large the model is; null: all
    of them at once. auto: 2**25, and more if there are more than 32 ranks, whose parts of a message would be short.
    With offload.mode=auto the size of chunks is searched instead."""
    overlap: bool = True
    """Let reductions run while backward goes on; false: wait for each one at once. The values are equal."""
    overlap_gather: bool = False
    """Let the gathers of updated parameters run while the next forward goes on, if full parameters persist: a module
    waits for its own parameters before it runs. If the whole model is compiled, its graph ends at each of these waits.
    false: the optimizer's step waits for all gathers."""
    optimizer_over: OptimizerOver = "group"
    """With groups of ranks that divide the states (parallel.shard_size). group: each group has all of the optimizer's
    states; all: they are divided over the ranks of all groups, whose networks then carry gradients and updated
    parameters once a step."""
    accumulate: Accumulate = "reduce"
    """If gradients are partitioned. reduce: they are reduced in every micro-batch; local: full gradients are kept, and
    reduced in the last micro-batch."""
    accumulate_dtype: DtypeName | None = None
    """Data type in which the gradients of micro-batches are summed: that of full gradients if these are kept, else of
    the owned shards. null: fp32 if parameters have half precision, else their type."""
    reduce_dtype: DtypeName | None = None
    """Data type in which gradients are reduced, and staged before that: that of the messages between ranks. null:
    accumulate_dtype if full gradients are kept, else the type of the parameters."""
    sum_over_ranks: SumOverRanks = "message"
    """Data type in which ranks add gradients if messages have half precision. message: that of the backend, which for
    NCCL is the type of the message, and each rank rounds; fp32: rounded once, over NCCL by an all-to-all of as many
    bytes and a sum. Choose fp32 with groups of ranks, such as nodes (parallel.shard_size): if one all-to-all spans
    nodes of G ranks, their network carries G times as much as with a ring. gloo adds in fp32 with both. leaves: the
    gradients of all micro-batches of a step are added one after the other, with the same bits on any number of ranks,
    and the gradient is their mean: do not divide the loss by their number. Ranks that keep full gradients, and groups,
    add blocks of them: see leaf_blocks."""
    gather_dtype: Literal["fp8"] | None = None
    """Data type in which weights are gathered that only products in FP8 read: half the bytes, and the same bits of
    losses and parameters. Recipes tensorwise and blockwise have it, whose scales are those of a weight and of its
    transpose. null: that of the parameters."""
    leaf_blocks: Positive = 1
    """With sum_over_ranks=leaves: the blocks of a step's micro-batches whose sums are added along a binary tree. Ranks
    that keep full gradients (stages 0 and 1, accumulate=local), or else groups of ranks, have as many blocks each, a
    power of two; one group of ranks takes any number. With
    train.reproducible=layout, train.reproducible_blocks sets this."""
    leaf_parts: Positive = 1
    """With sum_over_ranks=leaves: the neighboring ranks that compute a part of each micro-batch. Full gradients that
    are kept are added part by part. With train.reproducible=layout, parallel.context_size sets this."""
    prefetch_numel: NonNegative | None = None
    """If parameters are partitioned: the number of elements of the next units that are gathered ahead; 0: none; null:
    those of the next unit."""
    resident_numel: NonNegative = 0
    """If parameters are partitioned: those with fewer elements than this stay gathered, such as norms and biases."""
    defragment: bool | None = None
    """Allocate the memory of gradients once (M_D of the paper), if full gradients are transient. false: allocate
    staging memory in backward only, and owned gradients from backward to the update; this leaves more memory for the
    forward and more work for the allocator. null: false if parameters are partitioned, else true."""
    alignment: Annotated[int, Range(ALIGNMENT, 2**16)] = ALIGNMENT
    """Parameters and shards begin at multiples of this many elements, a multiple of 16. 8-bit Adam needs 256, so that
    its blocks are not cut; the setting of the optimizer's name takes care of it."""
    units: tuple[str, ...] | None = None
    """The modules that are gathered at a time, by patterns such as blocks.*; null: the elements of the module lists."""

    def __post_init__(self) -> None:
        for name in ("accumulate_dtype", "reduce_dtype"):
            if isinstance(dtype := getattr(self, name), torch.dtype):  # torch's own objects are taken too
                object.__setattr__(self, name, NAMES.get(dtype, str(dtype)))
        check_fields(self)
        if self.fixes_order:  # no shard divides a block of the norm
            object.__setattr__(self, "alignment", math.lcm(self.alignment, NORM_BLOCK))
        if self.alignment % ALIGNMENT:
            raise ConfigError(
                f"ZeroConfig.alignment={self.alignment} is not a multiple of {ALIGNMENT}; choose {ALIGNMENT} or 256"
            )

    @property
    def fixes_order(self) -> bool:
        """True if the gradients of all micro-batches are added in an order that no number of ranks changes."""
        return self.sum_over_ranks == "leaves"

    @property
    def policy(self) -> ShardingPolicy:
        """The stage's row of the table, with what the other settings change in it."""
        row = STAGES[self.stage]
        allocates_once = row.full_params is Lifetime.PERSISTENT if self.defragment is None else self.defragment
        owned_grads = Lifetime.PERSISTENT if allocates_once else Lifetime.TRANSIENT
        over_all = self.optimizer_over == "all" and row.optimizer is not Division.NONE
        optimizer = Division.ALL if over_all else row.optimizer
        is_local = self.accumulate == "local"
        return replace(
            row,
            optimizer=optimizer,
            keeps_full_grads=is_local,
            owned_grads=owned_grads,
        )

    def gradient_types(self, parameter: torch.dtype, *, accumulates: bool = True) -> GradientTypes:
        """Return the types of the gradients of parameters of one type.

        Without `accumulates` a step has a single backward: full gradients that are kept then have the parameters' type.
        """
        persist = self.policy.full_grads is Lifetime.PERSISTENT
        wide = torch.promote_types(parameter, torch.float32)
        accumulate = wide if accumulates or not persist or self.fixes_order else parameter
        if self.accumulate_dtype is not None:
            accumulate = DTYPES[self.accumulate_dtype]
        reduce = accumulate if persist else parameter
        types = GradientTypes(accumulate, reduce if self.reduce_dtype is None else DTYPES[self.reduce_dtype])
        if persist and self.fixes_order and types.reduce is not accumulate:
            raise ConfigError(
                f"ZeroConfig.reduce_dtype={self.reduce_dtype} rounds sums of micro-batches that were added in "
                f"{NAMES[accumulate]}, and sum_over_ranks=leaves rounds nothing but leaves; choose reduce_dtype=null"
            )
        return types

    def chosen_bucket_numel(self, num_elements: int, num_ranks: int, parameter: torch.dtype) -> int:
        """Return the number of elements of a bucket of a model with `num_elements` of the type `parameter`.

        A message of a ring is cut into parts, one for each rank, and a short part takes the latency of a hop however
        short it is: so buckets grow with the ranks, as long as they stay small beside what is allocated anyway. With
        groups `num_ranks` are all ranks too: the rings between groups cut the shard that a group's ring has left.
        """
        if self.bucket_numel != "auto":
            return self.bucket_numel or num_elements
        types = self.gradient_types(parameter)
        if self.policy.full_grads is Lifetime.PERSISTENT and types.accumulate is types.reduce:
            largest = num_elements // 8  # buckets are parts of the full buffer, and all but the first are overlapped
        else:
            largest = LARGEST_POOL_BYTES // (NUM_STAGED * types.reduce.itemsize)
        return max(SMALLEST_BUCKET, min(NUMEL_PER_RANK * num_ranks, largest))

    def with_gradient_types(self, parameter: torch.dtype, *, accumulates: bool) -> "ZeroConfig":
        """Return these settings with the types that `gradient_types` returns."""
        accumulate, reduce = (NAMES[t] for t in self.gradient_types(parameter, accumulates=accumulates))
        return replace(self, accumulate_dtype=accumulate, reduce_dtype=reduce)
