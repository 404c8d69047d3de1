"""The full gradients of a bucket, from the first one that arrives to the end of their reduction.

staged       the buffer of the bucket, with memory of its own for the whole run, or one from a small pool
message      `staged`, or its cast if gradients are reduced in another type; the sum over ranks replaces a shard of it
"""

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from parallel.memory_kinds import TensorKind
from parallel.mesh import Work
from zero.memory.placement import Offload, Placement
from zero.memory.staging import StagingPool
from zero.partition.layout import cut
from zero.partition.stage import GradientTypes, Lifetime, ShardingPolicy


@dataclass(frozen=True)
class BucketRanges:
    """The elements of a flat buffer that one bucket has."""

    elements: range
    group_shard: range
    """The elements whose gradients and parameters this rank has, in its group."""
    shard: range
    """The elements that this rank owns: those of its optimizer's states."""
    parts: dict[nn.Parameter, range]
    """The elements of each parameter."""
    gaps: list[range]
    """The elements that belong to no parameter."""

    def owned_of(self, group_shard: Tensor) -> Tensor:
        """Return the elements that this rank owns as a view of its shard in the group."""
        return cut(group_shard, self.shard, self.group_shard.start)


@dataclass(frozen=True)
class GradientPath:
    """The memories through which the gradients of a bucket go: full gradients -> message -> owned shard."""

    types: GradientTypes
    policy: ShardingPolicy
    placement: Placement
    """The memory of the owned shard."""
    has_groups: bool
    """True if there are groups of ranks, whose sums of all micro-batches are added up once a step."""

    @property
    def persists(self) -> bool:
        """True if full gradients have memory of their own; else they are staged in a buffer of the pool."""
        return self.policy.full_grads is Lifetime.PERSISTENT

    @property
    def staged_type(self) -> torch.dtype:
        """The type of the full gradients."""
        return self.types.accumulate if self.persists else self.types.reduce

    @property
    def casts_message(self) -> bool:
        """True if the full gradients are cast into a buffer of the pool, which is then reduced."""
        return self.staged_type is not self.types.reduce

    @property
    def casts_for_host(self) -> bool:
        """True if the reduced shard is cast before it is copied to the host."""
        return self.placement is Placement.HOST and self.types.accumulate is not self.types.reduce

    @property
    def owns_staged(self) -> bool:
        """True if the owned shard is a view of the full gradients."""
        return self.persists and self.placement is Placement.ACCELERATOR

    @property
    def frees_owned(self) -> bool:
        """True if the owned shard is freed between steps; pinned memory stays, because it is expensive to allocate."""
        is_apart = not self.persists and self.placement is Placement.ACCELERATOR
        return is_apart and self.policy.owned_grads is Lifetime.TRANSIENT


class Staging(Enum):
    """The use of the memory of a bucket's full gradients."""

    FREE = "no full gradient is stored; if the memory persists, its owned shard may hold the reduced gradient"
    FILLING = "gradients of one or more backwards have been written, and more may be added"
    REDUCING = "the reduction has been launched, and the memory belongs to it"


class FullGradients:
    """The full gradients of one bucket: written as they arrive, then reduced from a message."""

    def __init__(self, ranges: BucketRanges, path: GradientPath, offload: Offload):
        self._ranges, self._types, self._persists = ranges, path.types, path.persists
        self._staged_type, self._casts_message = path.staged_type, path.casts_message
        self.staging = Staging.FREE
        self._unwritten: set[nn.Parameter] = set()  # parameters without a value in `staged`
        self.host_copy = Work()  # of the last reduced shard; waited for before its memory is overwritten
        self.staged: Tensor | None = None  # a buffer of the pool may have more elements than the bucket
        self._cast: Tensor | None = None  # a buffer of the pool: `staged` in the type of messages, if that is another
        if self._persists:
            numel = len(ranges.elements)
            self.staged = offload.new(Placement.ACCELERATOR, TensorKind.GRADIENTS, numel, self._staged_type)

    def write(self, param: nn.Parameter, grad: Tensor, scale: float, pool: StagingPool) -> None:
        """Write, or add, `scale` times the elements of a flat gradient that are in this bucket."""
        self._begin_to_fill(pool)
        staged = self.view(self._ranges.parts[param])
        if param in self._unwritten:
            scale_into(staged, grad, scale)
            self._unwritten.discard(param)
        else:
            staged.add_(grad, alpha=scale)

    def fill(self, pool: StagingPool) -> Tensor:
        """Return the full gradients, with zeros where none was written."""
        self._begin_to_fill(pool)
        for param in self._unwritten:
            self.view(self._ranges.parts[param]).zero_()
        return self.view(self._ranges.elements)

    def start_reducing(self, values: Tensor, pool: StagingPool) -> Tensor:
        """Return the message with the result of `fill`; the caller reduces it next."""
        self.staging = Staging.REDUCING
        if not self._casts_message:
            return values
        self._cast = pool.take(self._types.reduce)
        return self.message(self._ranges.elements).copy_(values)

    def unstage(self, pool: StagingPool) -> None:
        """Discard the full gradients, and return their memory to the pool unless it persists."""
        self.staging = Staging.FREE
        if self._cast is not None:
            pool.put_back(self._cast, self.host_copy)
            self._cast = None
        if self.staged is not None and not self._persists:
            pool.put_back(self.staged, self.host_copy)
            self.staged = None

    def discard(self, params: Set[nn.Parameter]) -> None:
        """Discard the gradients of some parameters of this bucket."""
        if self.staging is Staging.FILLING:
            self._unwritten |= params

    def view(self, elements: range) -> Tensor:
        """Return elements of the buffer that are staged."""
        assert self.staged is not None
        return cut(self.staged, elements, self._ranges.elements.start)

    def message(self, elements: range) -> Tensor:
        """Return elements of the buffer in the message, while that is reduced."""
        return self.view(elements) if self._cast is None else cut(self._cast, elements, self._ranges.elements.start)

    def _begin_to_fill(self, pool: StagingPool) -> None:
        if self.staging is not Staging.FREE:
            return
        if self.staged is None:
            self.staged = pool.take(self._staged_type)
        self.host_copy.wait()  # before anything is written: that copy may still read the memory
        for gap in self._ranges.gaps:
            self.view(gap).zero_()
        self._unwritten, self.staging = set(self._ranges.parts), Staging.FILLING


def scale_into(out: Tensor, values: Tensor, scale: float) -> Tensor:
    """Set `out` to `scale` times `values`, in place if both are the same memory, and return it."""
    if scale == 1:
        return out.copy_(values)  # returns early if both are the same memory
    if torch.promote_types(out.dtype, values.dtype) is values.dtype:
        return torch.mul(values, scale, out=out)  # scaled before it is cast to a smaller type, in which it may overflow
    return out.copy_(values).mul_(scale)  # `torch.mul` would round the product to the type of `values`
