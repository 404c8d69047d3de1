"""Buckets: the ranges of a flat buffer that are communicated, updated and placed at once. Rank r owns shard r.

params.full      all shards, while the parameters are unsharded
params.group_shard   this rank's shard in its group: a view of `full` if that persists, else memory of its own
params.owned     the part of it that this rank owns, a view; on one level all of it
params.cached    a copy of `group_shard` on the device, if that is in host memory and there is room for the copy
grads.staged     this rank's full gradients, until the reduction ends
message          `staged`, or its cast if gradients are reduced in another type; the sum over ranks replaces its shard
grads.group_shard    this rank's shard of the sum over its group: a view of `staged` if that persists and the shard is
                 placed on the accelerator, else memory of its own
grads.owned      the part that this rank owns, a view; in the end the mean over all data ranks
master           the owned parameters in at least fp32, stored beside the optimizer's states; in fp32 `params.owned`
                 itself, if both have the same placement

If full parameters persist, `params.owned` may be written in place between steps; master weights that have memory of
their own follow before the next update.
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from parallel.memory_kinds import TensorKind
from parallel.mesh import Work
from zero.buckets.leaf_blocks import BlockSums
from zero.memory.placement import Offload, Placement
from zero.memory.staging import StagingPool, free_storage, restore_storage
from zero.memory.streams import SideStream
from zero.partition.layout import cut, overlap
from zero.partition.stage import GradientTypes, Levels, Lifetime, ShardingPolicy

TAKEN_NUMEL = 2**22  # master weights that are compared with parameters at a time: the temporaries have this length


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


class ParamShard:
    """The parameters of one bucket: this rank's shard in its group, the part that it owns, and the full buffer."""

    def __init__(
        self,
        full: Tensor,
        ranges: BucketRanges,
        levels: Levels,
        offload: Offload,
        lifetime: Lifetime,
        gather_stream: SideStream,
    ):
        """`full`: the elements of the bucket; the shard is copied to separate memory if `full` is transient."""
        self.full, self._in_full = full, cut(full, ranges.group_shard, ranges.elements.start)
        self._levels, self._offload, self._ranges = levels, offload, ranges
        self.persists = lifetime is Lifetime.PERSISTENT
        self.placement = Placement.ACCELERATOR if self.persists else offload.config.initial_placement("parameters")
        self.group_shard = self._in_full if self.persists else self._copy_shard(self.placement)
        self.owned = ranges.owned_of(self.group_shard)
        self.cached: Tensor | None = None
        self._gather_stream = gather_stream
        self._updated: Work | None = None  # the last gather of owned parts to the shard, unless it was waited for

    def all_gather(self) -> Work:
        """Fill `full` with the shards of the group; wait before it is read."""
        if self._updated is None:
            return self._gather_in_group()
        with self._gather_stream.context():
            self.wait_for_update()  # the side stream waits; on a CPU the host does, so all ranks launch in one order
            gather = self._gather_in_group()
            if self._levels.inner.size > 1:
                return gather
            return Work(gather.wait, self._gather_stream.device_work().wait)  # a copy on this stream, no collective

    def all_gather_updated(self) -> Work:
        """Gather new values of `owned` between groups; then renew the cache, or a `full` that persists.

        A transient `full` must have been resharded before; its next gather waits for the one between groups.
        """
        self.wait_for_update()  # of an earlier update, if nothing has read the parameters since then
        if self._levels.num_parts > 1:
            self._updated = self._gather_between_groups()
        if self.cached is not None:
            with self._gather_stream.context():
                self.wait_for_update()
                return self._offload.to_accelerator(self.group_shard, out=self.cached)
        return self.all_gather() if self.persists else Work()

    def fetch(self) -> None:
        """Keep a copy of the shard on the device until `evict`. The parameters must be unsharded."""
        self.cached = self._copy_shard(Placement.ACCELERATOR)

    def evict(self) -> None:
        """Free the copy on the device; the host has the same values."""
        self.cached = None

    def wait_for_update(self) -> None:
        """Wait for the gather between groups, which reads and writes the shard; at once if there is none."""
        if self._updated is not None:
            self._updated.wait()
            self._updated = None

    def _gather_in_group(self) -> Work:
        gather = self._levels.inner.all_gather
        if self.placement is Placement.HOST and self.cached is None:
            # The shard is copied to its place in `full`, and the all-gather is launched behind the copy, in place.
            in_place = partial(gather, self._in_full, out=self.full)
            return self._offload.to_accelerator(self.group_shard, self._in_full, in_place)
        return gather(self.group_shard if self.cached is None else self.cached, out=self.full)

    def _gather_between_groups(self) -> Work:
        outer = self._levels.outer
        if self.placement is Placement.ACCELERATOR:
            return outer.all_gather(self.owned, out=self.group_shard)
        buffers = self._offload.relays
        buffer = buffers.take(self.group_shard)
        shard = buffer[: self.group_shard.numel()]
        own = self._ranges.owned_of(shard)
        gathered = self._offload.to_accelerator(self.owned, own, partial(outer.all_gather, own, out=shard))
        copy_back = partial(self._offload.to_host, shard, out=self.group_shard)
        copied = self._gather_stream.launch_after(gathered, copy_back)
        # The next gather may wait for it on a side stream; the computation, which takes the buffer again, by itself.
        buffers.put_back(buffer, Work(copied.wait, self._offload.copies_to_host().wait))
        return copied

    def _copy_shard(self, placement: Placement) -> Tensor:
        shard = self._in_full
        return self._offload.new(placement, TensorKind.PARAMETERS, shard.numel(), shard.dtype).copy_(shard)


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


class Held(Enum):
    """The content of a shard of gradients between two reductions."""

    NOTHING = "no gradient"
    SUM = "the sum of earlier micro-batches, to which the next reduction is added"
    MEAN = "in its owned part, the mean of a step, after which a further backward begins anew"
    SET_ASIDE = "nothing more: the mean of a step was copied, and is added to the next one"


class GradShard:
    """The gradients of one bucket: `staged` in full until they are reduced, then `owned`, the mean over the data ranks.

    `held` is independent of `staging`: with accumulation, `group_shard` holds the sum of earlier micro-batches while
    the gradients of the next one are staged.
    """

    def __init__(
        self, ranges: BucketRanges, types: GradientTypes, policy: ShardingPolicy, levels: Levels, offload: Offload
    ):
        self._ranges, self._offload = ranges, offload
        placement = offload.config.initial_placement("optimizer")
        self.path = GradientPath(types, policy, placement, has_groups=levels.outer.size > 1)
        self.staging, self.held = Staging.FREE, Held.NOTHING
        self._unwritten: set[nn.Parameter] = set()  # parameters without a value in `staged`
        self.host_copy = Work()  # of the last reduced shard; waited for before its memory is overwritten
        self.staged: Tensor | None = None  # a buffer of the pool may have more elements than the bucket
        self._cast: Tensor | None = None  # a buffer of the pool: `staged` in the type of messages, if that is another
        self._earlier: Tensor | None = None  # the gradient that is set aside
        self.blocks = BlockSums()  # of the present step, if gradients are added in blocks
        if self.persists:
            numel = len(ranges.elements)
            self.staged = offload.new(Placement.ACCELERATOR, TensorKind.GRADIENTS, numel, self.path.staged_type)
        self.place(self.placement)

    @property
    def parts(self) -> dict[nn.Parameter, range]:
        """The elements of the buffer that each parameter has in this bucket."""
        return self._ranges.parts

    @property
    def persists(self) -> bool:
        """True if the full gradients have memory of their own for the whole run."""
        return self.path.persists

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
        return self._view(self._ranges.group_shard, self._cast)

    @property
    def message_owned(self) -> Tensor:
        """The elements of the message that this rank owns, after `finish`."""
        return self._view(self._ranges.shard, self._cast)

    def place(self, placement: Placement) -> None:
        """Move the owned shard to one of the memories. The values of a gradient that it holds are lost."""
        self.path = path = replace(self.path, placement=placement)
        if path.owns_staged:
            self.group_shard = self._view(self._ranges.group_shard)
        else:
            numel = len(self._ranges.group_shard)
            self.group_shard = self._offload.new(placement, TensorKind.GRADIENTS, numel, path.types.accumulate).zero_()
        self.owned = self._ranges.owned_of(self.group_shard)
        self.free_owned()

    def write(self, param: nn.Parameter, grad: Tensor, scale: float, pool: StagingPool) -> None:
        """Write, or add, `scale` times the elements of a flat gradient that are in this bucket."""
        self._begin_to_fill(pool)
        staged = self._view(self.parts[param])
        if param in self._unwritten:
            scale_into(staged, grad, scale)
            self._unwritten.discard(param)
        else:
            staged.add_(grad, alpha=scale)

    def finish(self, pool: StagingPool) -> Tensor:
        """Fill with zeros what no gradient has been written to; return the message, which the caller reduces next."""
        full = self._fill(pool)
        if self.persists:
            self.blocks.add_to(full)
        self.staging = Staging.REDUCING
        if not self.path.casts_message:
            return full
        self._cast = pool.take(self.path.types.reduce)
        return self._view(self._ranges.elements, self._cast).copy_(full)

    def end_block(self, pool: StagingPool) -> None:
        """Keep the full gradients, which persist, as the sum of a block of micro-batches; the next ones begin anew."""
        self.push_block(self._fill(pool))
        self.staging = Staging.FREE

    def push_block(self, values: Tensor) -> None:
        """Add a copy of gradients on the accelerator to the blocks of this step."""
        copy = self._offload.new(Placement.ACCELERATOR, TensorKind.GRADIENTS, values.numel(), values.dtype)
        self.blocks.push(copy.copy_(values))

    def _fill(self, pool: StagingPool) -> Tensor:
        """Return the full gradients, with zeros where none was written."""
        self._begin_to_fill(pool)
        for param in self._unwritten:
            self._view(self.parts[param]).zero_()
        return self._view(self._ranges.elements)

    def unstage(self, pool: StagingPool) -> None:
        """Discard the full gradients, and return their memory to the pool unless it persists."""
        self.staging = Staging.FREE
        if self._cast is not None:
            pool.put_back(self._cast, self.host_copy)
            self._cast = None
        if self.staged is not None and not self.persists:
            pool.put_back(self.staged, self.host_copy)
            self.staged = None

    def _begin_to_fill(self, pool: StagingPool) -> None:
        if self.staging is not Staging.FREE:
            return
        if self.staged is None:
            self.staged = pool.take(self.path.staged_type)
        self.host_copy.wait()  # before anything is written: that copy may still read the memory
        for gap in self._ranges.gaps:
            self._view(gap).zero_()
        self._unwritten, self.staging = set(self.parts), Staging.FILLING

    def set_aside(self) -> None:
        """Keep a reduced gradient while full gradients are staged again; the next reduction adds it."""
        self.held = Held.SUM
        # The next gradients overwrite it, or are added to it and divided by the number of their micro-batches.
        if self.path.owns_staged or self.path.has_groups or self.path.policy.adds_leaves:
            own = self._offload.new(self.placement, TensorKind.GRADIENTS, self.owned.numel(), self.owned.dtype)
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
        if self.placement is Placement.HOST:
            fetched = self._offload.new(Placement.ACCELERATOR, TensorKind.GRADIENTS, earlier.numel(), earlier.dtype)
            self._offload.to_accelerator(earlier, out=fetched).wait()
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

    def _view(self, elements: range, cast: Tensor | None = None) -> Tensor:
        full = self.staged if cast is None else cast
        assert full is not None
        return cut(full, elements, self._ranges.elements.start)


class Bucket:
    """A range of a flat buffer that is communicated at once: its parameters, gradients and master weights."""

    def __init__(self, ranges: BucketRanges, params: ParamShard, grads: GradShard | None, offload: Offload):
        """`grads` is None if the parameters are frozen."""
        self.elements, self.group_shard, self.shard = ranges.elements, ranges.group_shard, ranges.shard
        self.params = params
        self._grads, self._offload = grads, offload
        self.master = params.owned  # until an optimizer calls `place_master`
        self._master_placement: Placement | None = None

    @property
    def grads(self) -> GradShard:
        """The gradients of a bucket that is trainable."""
        assert self._grads is not None
        return self._grads

    @property
    def optimizer_placement(self) -> Placement:
        """The memory of the owned gradient, the master weights and the optimizer's states."""
        return self.grads.placement

    def owned_part(self, owned: Tensor, elements: range) -> Tensor:
        """Return a view of `elements` of the buffer, which this rank owns, from a tensor that covers its shard."""
        return cut(owned, elements, self.shard.start)

    def place_master(self, placement: Placement) -> None:
        """Move the master weights to one of the memories, in at least fp32, with their values.

        They share the memory of the owned parameters if dtype and placement agree. The caller places the gradients and
        the optimizer's states too. Nothing changes if they are there: other optimizers may have views of them.
        """
        if placement is self._master_placement:
            return
        self._master_placement = placement
        owned, values = self.params.owned, self.master
        dtype = torch.promote_types(values.dtype, torch.float32)
        self.master = owned
        if dtype is not owned.dtype or placement is not self.params.placement:
            self.master = self._offload.new(placement, TensorKind.MASTER, owned.numel(), dtype)
        self.master.copy_(values)  # returns early if both are the same memory

    @property
    def casts_gradient(self) -> bool:
        """True if the optimizer needs the owned gradient in another type, that of the master weights."""
        return self.grads.path.types.accumulate is not self.master.dtype

    @property
    def master_may_be_outdated(self) -> bool:
        """True if the owned parameters may be written in place, and the master weights would not change with them."""
        return self.params.persists and self.master is not self.params.owned


def scale_into(out: Tensor, values: Tensor, scale: float) -> Tensor:
    """Set `out` to `scale` times `values`, in place if both are the same memory, and return it."""
    if scale == 1:
        return out.copy_(values)  # returns early if both are the same memory
    if torch.promote_types(out.dtype, values.dtype) is values.dtype:
        return torch.mul(values, scale, out=out)  # scaled before it is cast to a smaller type, in which it may overflow
    return out.copy_(values).mul_(scale)  # `torch.mul` would round the product to the type of `values`


def take_changed(master: Tensor, values: Tensor) -> None:
    """Set the master weights that do not round to their parameters' `values` to these; the others keep their digits."""
    for old, new in zip(master.split(TAKEN_NUMEL), values.split(TAKEN_NUMEL), strict=True):
        torch.where(old.to(new.dtype) == new, old, new, out=old)
