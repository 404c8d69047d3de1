"""The settings of ZeRO and of offloading; `zero/chosen.py` has what they stand for."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch

from parallel.validation.errors import ConfigError
from parallel.validation.fields import Positive, Range, checked
from zero.core.partition.config import NAMES, PartitionConfig
from zero.core.partition.layout import NORM_BLOCK
from zero.core.partition.stage import Division, GradientTypes, Lifetime, ShardingPolicy

OptimizerOver = Literal["group", "all"]
SumOverRanks = Literal["message", "fp32", "leaves"]
Mode = Literal["accelerator", "host", "auto"]
State = Literal["optimizer", "parameters"]


@dataclass(frozen=True)
class ZeroConfig(PartitionConfig):
    """The partition of model states over the data-parallel ranks, and the portions in which they are communicated."""

    optimizer_over: OptimizerOver = "group"
    """With groups of ranks that divide the states (parallel.shard_size). group: each group has all of the optimizer's
    states; all: they are divided over the ranks of all groups, whose networks then carry gradients and updated
    parameters once a step."""
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
    overlap_gather: bool = False
    """Let the gathers of updated parameters run while the next forward goes on, if full parameters persist: a module
    waits for its own parameters before it runs. If the whole model is compiled, its graph ends at each of these waits.
    false: the optimizer's step waits for all gathers."""
    leaf_blocks: Positive = 1
    """With sum_over_ranks=leaves: the blocks of a step's micro-batches whose sums are added along a binary tree. Ranks
    that keep full gradients (stages 0 and 1, accumulate=local), or else groups of ranks, have as many blocks each, a
    power of two; one group of ranks takes any number. With
    train.reproducible=layout, train.reproducible_blocks sets this."""
    leaf_parts: Positive = 1
    """With sum_over_ranks=leaves: the neighboring ranks that compute a part of each micro-batch. Full gradients that
    are kept are added part by part. With train.reproducible=layout, parallel.context_size sets this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fixes_order:  # no shard divides a block of the norm
            object.__setattr__(self, "alignment", math.lcm(self.alignment, NORM_BLOCK))

    @property
    def fixes_order(self) -> bool:
        """True if the gradients of all micro-batches are added in an order that no number of ranks changes."""
        return self.sum_over_ranks == "leaves"

    @property
    def policy(self) -> ShardingPolicy:
        """The stage's row of the table, with what the other settings change in it."""
        row = super().policy
        over_all = self.optimizer_over == "all" and row.divides_optimizer
        return replace(row, optimizer=Division.ALL) if over_all else row

    def gradient_types(self, parameter: torch.dtype, *, accumulates: bool = True) -> GradientTypes:
        """Return the types of the gradients of parameters of one type; in a fixed order, sums are not rounded."""
        types = super().gradient_types(parameter, accumulates=accumulates or self.fixes_order)
        if self.fixes_order and self.policy.full_grads is Lifetime.PERSISTENT and types.reduce is not types.accumulate:
            raise ConfigError(
                f"ZeroConfig.reduce_dtype={self.reduce_dtype} rounds sums of micro-batches that were added in "
                f"{NAMES[types.accumulate]}, and sum_over_ranks=leaves rounds nothing but leaves; choose "
                "reduce_dtype=null"
            )
        return types


@checked
class OffloadConfig:
    """The model states that are stored in host memory: none, all of `states`, or those that do not fit elsewhere."""

    mode: Mode = "accelerator"
    """accelerator: no state is offloaded; host: all of `states` are; auto: only those that do not fit on the
    accelerator (Gemini), in chunks whose size is searched, whatever bucket_numel is."""
    states: tuple[State, ...] = ("optimizer", "parameters")
    """The states that may be offloaded. optimizer: owned gradients, master weights and moments, updated by the host;
    parameters: the shards of stage 3, which are copied to the accelerator for every all-gather."""
    accelerator_memory_gb: Annotated[float, Range(above=0, at_most=1e9)] | None = None
    """Limit of the memory that the process may use on the accelerator, in 1e9 bytes. A run that needs more in one of
    its first two steps ends there, and says how much more. null: no limit or, with auto, nine tenths of the device."""
    hidden_dim: Positive = 1024
    """auto: chunk sizes are searched in steps of this many elements; the model's hidden size suits its blocks best."""
    min_chunk_size_m: Annotated[float, Range(above=0, at_most=2**20)] = 32.0
    """auto: the smallest chunk size to try, in 2**20 elements."""
    search_range_m: Annotated[float, Range(0, 2**20)] = 32.0
    """auto: how far above the smallest size to search, in 2**20 elements."""

    @property
    def offloaded_states(self) -> set[State]:
        """The states that may be in host memory."""
        return set() if self.mode == "accelerator" else set(self.states)


NO_OFFLOAD = OffloadConfig()
