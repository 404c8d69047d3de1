"""The settings of the partition of model states that every stage has."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import torch

from parallel.validation.errors import ConfigError
from parallel.validation.fields import NonNegative, Positive, Range, check_fields
from zero.core.partition.layout import ALIGNMENT
from zero.core.partition.stage import STAGES, GradientTypes, Lifetime, ShardingPolicy

Accumulate = Literal["reduce", "local"]
SMALLEST_BUCKET, NUMEL_PER_RANK = 2**25, 2**20
NUM_STAGED = 3  # buckets in a pool, at most: two are reduced while one is filled
LARGEST_POOL_BYTES = 1_600_000_000  # 5% of an accelerator of 32 GB
DtypeName = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[DtypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class PartitionConfig:
    """The partition of model states over the data-parallel ranks, and the portions in which they are communicated."""

    stage: Annotated[int, Range(min(STAGES), max(STAGES))] = 2
    """0: plain data parallelism; 1: optimizer states are partitioned; 2: gradients too; 3: parameters too."""
    bucket_numel: Positive | Literal["auto"] | None = "auto"
    """C_B: the number of elements that are communicated, cast or summed at once, however large the model is; null: all
    of them at once. auto: 2**25, and more if there are more than 32 ranks, whose parts of a message would be short."""
    overlap: bool = True
    """Let reductions run while backward goes on; false: wait for each one at once. The values are equal."""
    accumulate: Accumulate = "reduce"
    """If gradients are partitioned. reduce: they are reduced in every micro-batch; local: full gradients are kept, and
    reduced in the last micro-batch."""
    accumulate_dtype: DtypeName | None = None
    """Data type in which the gradients of micro-batches are summed: that of full gradients if these are kept, else of
    the owned shards. null: fp32 if parameters have half precision, else their type."""
    reduce_dtype: DtypeName | None = None
    """Data type in which gradients are reduced, and staged before that: that of the messages between ranks. null:
    accumulate_dtype if full gradients are kept, else the type of the parameters."""
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
        if self.alignment % ALIGNMENT:
            raise ConfigError(
                f"ZeroConfig.alignment={self.alignment} is not a multiple of {ALIGNMENT}; choose {ALIGNMENT} or 256"
            )

    @property
    def policy(self) -> ShardingPolicy:
        """The stage's row of the table, with what the other settings change in it."""
        row = STAGES[self.stage]
        allocates_once = row.full_params is Lifetime.PERSISTENT if self.defragment is None else self.defragment
        owned_grads = Lifetime.PERSISTENT if allocates_once else Lifetime.TRANSIENT
        return replace(row, keeps_full_grads=self.accumulate == "local", owned_grads=owned_grads)

    def gradient_types(self, parameter: torch.dtype, *, accumulates: bool = True) -> GradientTypes:
        """Return the types of the gradients of parameters of one type.

        Without `accumulates` a step has a single backward: full gradients that are kept then have the parameters' type.
        """
        persist = self.policy.full_grads is Lifetime.PERSISTENT
        wide = torch.promote_types(parameter, torch.float32)
        accumulate = wide if accumulates or not persist else parameter
        if self.accumulate_dtype is not None:
            accumulate = DTYPES[self.accumulate_dtype]
        reduce = accumulate if persist else parameter
        return GradientTypes(accumulate, reduce if self.reduce_dtype is None else DTYPES[self.reduce_dtype])

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

    def with_gradient_types(self, parameter: torch.dtype, *, accumulates: bool) -> Self:
        """Return these settings with the types that `gradient_types` returns."""
        accumulate, reduce = (NAMES[t] for t in self.gradient_types(parameter, accumulates=accumulates))
        return replace(self, accumulate_dtype=accumulate, reduce_dtype=reduce)
