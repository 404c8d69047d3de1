"""The gradients of a bucket, from the first one that arrives to the mean that their owner has.

staged       this rank's full gradients: memory of their own for the whole run, or a buffer from a small pool
message      `staged`, or its cast if gradients are reduced in another type; the sum over ranks replaces a shard of it
group_shard  this rank's shard of the sum over its group and micro-batches, times 1/N unless there are groups: a view of
             `staged` if that persists and the shard is placed on the accelerator, else memory of its own
owned        the part of it that this rank owns, a view; in the end the mean over all data ranks
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

import torch
from torch import Tensor, nn

from parallel.memory_kinds import TensorKind
from parallel.mesh import Work
from zero.buckets.leaf_blocks import BlockSums
from zero.memory.placement import Offload, Placement
from zero.memory.staging import BufferPool, free_storage, restore_storage
from zero.partition.layout import cut, overlap
from zero.partition.stage import GradientTypes, Levels, Lifetime, ShardingPolicy


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
    offload: Offload
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


class Held(Enum):
    """The content of a shard of gradients between two reductions."""

    NOTHING = "no gradient"
    SUM = "the sum of micro-batches, to which the next one is added: times 1/N, or undivided with groups or leaves"
    MEAN = "the mean of a step, if a further backward begins anew: with persistent full gradients, groups or leaves"
    SET_ASIDE = "nothing more: the mean of a step was copied, and is added to the next one"


class GradShard:
    """The gradients of one bucket: written as they arrive, reduced from a message, and then a shard of their mean.

    `held` is independent of `staging`: with accumulation, `group_shard` holds the sum of earlier micro-batches while
    the gradients of the next one are staged.
    """

    def __init__(
        self, ranges: BucketRanges, types: GradientTypes, policy: ShardingPolicy, levels: Levels, offload: Offload
    ):
        self._ranges = ranges
        placement = offload.config.initial_placement("optimizer")
        self.path = GradientPath(types, policy, offload, placement, has_groups=levels.outer.size > 1)
        self.staging = Staging.FREE
        self.staged: Tensor | None = None  # a buffer of the pool may have more elements than the bucket
        if self.path.persists:
            numel = len(ranges.elements)
            self.staged = offload.new(Placement.ACCELERATOR, TensorKind.GRADIENTS, numel, self.path.staged_type)
        self._cast: Tensor | None = None  # a buffer of the pool: `staged` in the type of messages, if that is another
        self._unwritten: set[nn.Parameter] = set()  # parameters without a value in `staged`
        self.host_copy = Work()  # of the last reduced shard; waited for before its memory is overwritten
        self._earlier: Tensor | None = None  # the gradient that is set aside
        self.blocks = BlockSums()  # of the present step, if gradients are added in blocks
        self.place(placement)

    @property
    def parts(self) -> dict[nn.Parameter, range]:
        """The elements of the buffer that each parameter has in this bucket."""
        return self._ranges.parts

    @property
    def placement(self) -> Placement:
        """The memory of the owned shard."""
        return self.path.placement

    @property
    def is_empty(self) -> bool:
        """True if no gradient has arrived since the last update."""
        return self.held is Held.NOTHING and self.staging is Staging.FREE

    @property
    def message_shard(self) -> Tensor:
        """The elements of the message that this rank has in its group, after `finish`."""
        return self._message(self._ranges.group_shard)

    @property
    def message_owned(self) -> Tensor:
        """The elements of the message that this rank owns, after `finish`."""
        return self._message(self._ranges.shard)

    def place(self, placement: Placement) -> None:
        """Move the owned shard to one of the memories. The values of a gradient that it holds are lost."""
        self.path = path = replace(self.path, placement=placement)
        if path.owns_staged:
            self.group_shard = self._view(self._ranges.group_shard)
        else:
            numel = len(self._ranges.group_shard)
            self.group_shard = path.offload.new(placement, TensorKind.GRADIENTS, numel, path.types.accumulate).zero_()
        self.owned = self._ranges.owned_of(self.group_shard)
        self.free_owned()

    def write(self, param: nn.Parameter, grad: Tensor, scale: float, pool: BufferPool) -> None:
        """Write, or add, `scale` times the elements of a flat gradient that are in this bucket."""
        self._begin_to_fill(pool)
        staged = self._view(self._ranges.parts[param])
        if param in self._unwritten:
            scale_into(staged, grad, scale)
            self._unwritten.discard(param)
        else:
            staged.add_(grad, alpha=scale)

    def finish(self, pool: BufferPool) -> Tensor:
        """Fill with zeros what no gradient has been written to; return the message, which the caller reduces next."""
        values = self._fill(pool)
        if self.path.persists:
            self.blocks.add_to(values)
        self.staging = Staging.REDUCING
        if not self.path.casts_message:
            return values
        self._cast = pool.take(self.path.types.reduce)
        return self._message(self._ranges.elements).copy_(values)

    def unstage(self, pool: BufferPool) -> None:
        """Discard the full gradients, and return their memory to the pool unless it persists."""
        self.staging = Staging.FREE
        if self._cast is not None:
            pool.put_back(self._cast, self.host_copy)
            self._cast = None
        if self.staged is not None and not self.path.persists:
            pool.put_back(self.staged, self.host_copy)
            self.staged = None

    def end_block(self, pool: BufferPool) -> None:
        """Keep the full gradients, which persist, as the sum of a block of micro-batches; the next ones begin anew."""
        self.push_block(self._fill(pool))
        self.staging = Staging.FREE

    def push_block(self, values: Tensor) -> None:
        """Add a copy of gradients on the accelerator to the blocks of this step."""
        copy = self.path.offload.new(Placement.ACCELERATOR, TensorKind.GRADIENTS, values.numel(), values.dtype)
        self.blocks.push(copy.copy_(values))

    def set_aside(self) -> None:
        """Keep a reduced gradient while full gradients are staged again; the next reduction adds it.

        Call `Offload.synchronize` first if the owned shard is in host memory: the host reads it.
        """
        self.held = Held.SUM
        # The next gradients overwrite it, or are added to it and divided by the number of their micro-batches.
        if self.path.owns_staged or self.path.has_groups or self.path.policy.adds_leaves:
            own = self.path.offload.new(self.placement, TensorKind.GRADIENTS, self.owned.numel(), self.owned.dtype)
            self._earlier, self.held = own.copy_(self.owned), Held.SET_ASIDE

    def owned_of(self, group_shard: Tensor) -> Tensor:
        """Return the elements that this rank owns as a view of a tensor like its shard in the group."""
        return self._ranges.owned_of(group_shard)

    def accumulate(self, values: Tensor, out: Tensor, scale: float, *, adds: bool) -> None:
        """Set `out`, the owned part or the whole shard in the group, to `scale` times `values`, or add these to it."""
        if adds:
            out.add_(values, alpha=scale)
            return
        if self.path.frees_owned:
            restore_storage(self.group_shard)
        scale_into(out, values, scale)

    def add_earlier(self, total: Tensor) -> None:
        """Add the gradient that was set aside to the next mean."""
        if self._earlier is None:
            return
        earlier, self._earlier = self._earlier, None
        if self.placement is Placement.HOST:  # copied back, so that the host does not wait for the device to add them
            fetched = self.path.offload.new(Placement.ACCELERATOR, TensorKind.GRADIENTS, earlier.numel(), earlier.dtype)
            self.path.offload.to_accelerator(earlier, out=fetched).wait()
            earlier = fetched
        total.add_(earlier)

    def free_owned(self) -> None:
        """Discard the owned gradient; free its memory too, unless that is allocated for the whole run (M_D)."""
        self.held, self._earlier = Held.NOTHING, None
        self.blocks.clear()
        if self.path.frees_owned:
            free_storage(self.group_shard)

    def discard(self, params: Set[nn.Parameter]) -> None:
        """Discard the gradients of some parameters, staged or reduced, and keep those of others.

        The host waits for nothing: call `Offload.synchronize` first if the owned shard is in host memory.
        """
        discarded = self.parts.keys() & params
        if self.staging is Staging.FILLING:
            self._unwritten |= discarded
        if len(discarded) == len(self.parts):
            self.free_owned()
        else:
            held = [(self._earlier, self._ranges.shard)] if self._earlier is not None else []
            if self.held in (Held.SUM, Held.MEAN):
                held.append((self.group_shard, self._ranges.group_shard))
            for (tensor, own), param in product(held, discarded):
                if elements := overlap(self.parts[param], own):
                    cut(tensor, elements, own.start).zero_()

    def _begin_to_fill(self, pool: BufferPool) -> None:
        if self.staging is not Staging.FREE:
            return
        if self.staged is None:
            self.staged = pool.take(self.path.staged_type)
        self.host_copy.wait()  # before anything is written: that copy may still read the memory
        for gap in self._ranges.gaps:
            self._view(gap).zero_()
        self._unwritten, self.staging = set(self._ranges.parts), Staging.FILLING

    def _fill(self, pool: BufferPool) -> Tensor:
        """Return the full gradients, with zeros where none was written."""
        self._begin_to_fill(pool)
        for param in self._unwritten:
            self._view(self._ranges.parts[param]).zero_()
        return self._view(self._ranges.elements)

    def _view(self, elements: range) -> Tensor:
        assert self.staged is not None
        return cut(self.staged, elements, self._ranges.elements.start)

    def _message(self, elements: range) -> Tensor:
        """Return elements of the buffer in the message, while that is reduced."""
        return self._view(elements) if self._cast is None else cut(self._cast, elements, self._ranges.elements.start)


def scale_into(out: Tensor, values: Tensor, scale: float) -> Tensor:
    """Set `out` to `scale` times `values`, in place if both are the same memory, and return it."""
    if scale == 1:
        return out.copy_(values)  # returns early if both are the same memory
    if torch.promote_types(out.dtype, values.dtype) is values.dtype:
        return torch.mul(values, scale, out=out)  # scaled before it is cast to a smaller type, in which it may overflow
    return out.copy_(values).mul_(scale)  # `torch.mul` would round the product to the type of `values`
