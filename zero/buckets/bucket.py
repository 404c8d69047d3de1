"""Buckets: the ranges of a flat buffer that are communicated, updated and placed at once. Rank r owns shard r.

params.full      all shards, while the parameters are unsharded
params.group_shard   this rank's shard in its group: a view of `full` if that persists, else memory of its own
params.owned     the part of it that this rank owns, a view; on one level all of it
params.cached    a copy of `group_shard` on the device, if that is in host memory and there is room for the copy
grads            full gradients, their message, and the shard of the sum: zero/buckets/grad_shard.py
master           the owned parameters in at least fp32, stored beside the optimizer's states; in fp32 `params.owned`
                 itself, if both have the same placement

If full parameters persist, `params.owned` may be written in place between steps; master weights that have memory of
their own follow before the next update.
"""

from functools import partial

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind
from parallel.mesh import Work
from zero.buckets.grad_shard import BucketRanges, GradShard
from zero.buckets.weight_codes import BucketCodes
from zero.memory.placement import Offload, Placement
from zero.memory.streams import SideStream
from zero.partition.layout import cut
from zero.partition.stage import Levels, Lifetime

TAKEN_NUMEL = 2**22  # master weights that are compared with parameters at a time: the temporaries have this length


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
        persists = lifetime is Lifetime.PERSISTENT
        self.placement = Placement.ACCELERATOR if persists else offload.config.initial_placement("parameters")
        self.group_shard = self._in_full if persists else self._copy_shard(self.placement)
        self.owned = ranges.owned_of(self.group_shard)
        self.cached: Tensor | None = None
        self.codes: BucketCodes | None = None  # set if ranks send these parameters as codes
        self._gather_stream = gather_stream
        self._updated: Work | None = None  # the last gather of owned parts to the shard, unless it was waited for

    @property
    def persists(self) -> bool:
        """True if `full` stays allocated, and the shard is a view of it."""
        return self.group_shard is self._in_full

    def all_gather(self, *, exact: bool = True) -> Work:
        """Fill `full` with the shards of the group, or, unless `exact`, with what codes of them stand for.

        Wait before it is read.
        """
        # On the stream that reads it: memory that a side stream allocates returns to that stream.
        codes = None if exact or self.codes is None else self.full.new_empty(self.full.shape, dtype=torch.uint8)
        if self._updated is None:
            return self._gather_in_group(codes)
        with self._gather_stream.context():
            self.wait_for_update()  # the side stream waits; on a CPU the host does, so all ranks launch in one order
            gather = self._gather_in_group(codes)
            if self._levels.inner.size > 1:
                return gather
            return Work(gather.wait, self._gather_stream.device_work().wait)  # a copy on this stream, no collective

    def all_gather_updated(self, *, exact: bool = True) -> Work:
        """Gather new values of `owned` between groups; then renew the cache, or a `full` that persists.

        A transient `full` must have been resharded before; its next gather waits for the one between groups. Without
        `exact`, codes are not sent yet: call `all_gather` when the scales have been measured.
        """
        self.wait_for_update()  # of an earlier update, if nothing has read the parameters since then
        if self._levels.num_parts > 1:
            self._updated = self._gather_between_groups()
        if self.cached is not None:
            self.wait_for_update()  # without streams the shard is copied only now
            return self._offload.to_accelerator(self.group_shard, out=self.cached)
        return self.all_gather() if self.persists and (exact or self.codes is None) else Work()

    @torch.inference_mode(False)  # an update writes the copy, whatever mode an evaluation has
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

    def _gather_in_group(self, codes: Tensor | None) -> Work:
        gather = self._levels.inner.all_gather
        own = self.group_shard if self.cached is None else self.cached
        if self.placement is Placement.HOST and self.cached is None:
            # The shard is copied to its place in `full`, and the all-gather is launched behind the copy, in place.
            in_place = partial(gather, self._in_full, out=self.full) if codes is None else partial(self._send, codes)
            return self._offload.to_accelerator(own, self._in_full, in_place)
        if codes is None:
            return gather(own, out=self.full)
        self._in_full.copy_(own)  # returns early if both are the same memory
        return self._send(codes)

    def _send(self, codes: Tensor) -> Work:
        """Gather codes, and fill the rest of `full` from them when the result is waited for."""
        assert self.codes is not None
        gather = self._levels.inner.all_gather(self.codes.encode(self._in_full, codes), out=codes)
        return Work(gather.wait, partial(self.codes.decode, codes, self.full))

    def _gather_between_groups(self) -> Work:
        outer = self._levels.outer
        if self.placement is Placement.ACCELERATOR:
            return outer.all_gather(self.owned, out=self.group_shard)
        buffers = self._offload.relays
        buffer = buffers.take(self.group_shard.dtype, self.group_shard.numel())
        shard = buffer[: self.group_shard.numel()]
        own = self._ranges.owned_of(shard)
        gathered = self._offload.to_accelerator(self.owned, own, partial(outer.all_gather, own, out=shard))
        copy_back = partial(self._offload.to_host, shard, out=self.group_shard)
        copied = self._gather_stream.launch_after(gathered, copy_back)
        buffers.put_back(buffer, copied)
        return copied

    def _copy_shard(self, placement: Placement) -> Tensor:
        shard = self._in_full
        return self._offload.new(placement, TensorKind.PARAMETERS, shard.numel(), shard.dtype).copy_(shard)


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


def take_changed(master: Tensor, values: Tensor) -> None:
    """Set the master weights that do not round to their parameters' `values` to these; the others keep their digits."""
    for old, new in zip(master.split(TAKEN_NUMEL), values.split(TAKEN_NUMEL), strict=True):
        torch.where(old.to(new.dtype) == new, old, new, out=old)
