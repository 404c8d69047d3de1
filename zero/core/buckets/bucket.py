"""Buckets: the ranges of a flat buffer that are communicated, updated and placed at once, and what a rank has of them.

params.full      all elements, while the parameters are unsharded
params.rest      what this rank keeps of them: a view of `full` if that persists, else memory of its own
params.own       what this rank updates, a view of `rest`
params.cached    a copy of `rest` on the accelerator, if its home is apart and there is room for the copy
grads            full gradients, their message, and the sum that is kept: zero/core/buckets/bucket_gradient.py
master           the own parameters in at least fp32, stored beside the optimizer's states; in fp32 `params.own`
                 itself, if both have the same home

If full parameters persist, `params.own` may be written in place between steps; master weights that have memory of
their own follow before the next update.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind
from parallel.mesh import Work
from zero.core.buckets.bucket_gradient import BucketGradient
from zero.core.memory.streams import SideStream
from zero.core.partition.layout import Slice, cut
from zero.core.partition.stage import Lifetime
from zero.core.protocols.home import Home, Homes
from zero.core.protocols.transport import Transport

TAKEN_NUMEL = 2**22  # master weights that are compared with parameters at a time: the temporaries have this length


class ParamShard:
    """The parameters of one bucket: what this rank keeps of them, and the full buffer."""

    def __init__(self, full: Tensor, transport: Transport, homes: Homes, lifetime: Lifetime, gather_stream: SideStream):
        """`full`: the elements of the bucket; what is kept is copied to separate memory if `full` is transient."""
        self._transport, ranges = transport, transport.ranges
        self.full, self._in_full = full, ranges.of_bucket(full, ranges.rest)
        self._accelerator, self._ranges = homes.accelerator, ranges
        persists = lifetime is Lifetime.PERSISTENT
        self.home = homes.accelerator if persists else homes.parameters
        self.rest = self._in_full if persists else self._copy_rest(self.home)
        self.own = ranges.own_of(self.rest)
        self.cached: Tensor | None = None
        self._gather_stream = gather_stream
        self._published: Work | None = None  # the last publication of own parameters, unless it was waited for

    @property
    def persists(self) -> bool:
        """True if `full` stays allocated, and the shard is a view of it."""
        return self.rest is self._in_full

    def all_gather(self, *, lossless: bool = True) -> Work:
        """Fill `full` with what all ranks keep, or, unless `lossless`, with fewer digits of it if that sends less.

        Wait before it is read.
        """
        room = None if lossless else self._transport.room(self.full)
        if self._published is None:
            return self._gather(room)
        with self._gather_stream.context():
            self.wait_for_update()  # the side stream waits; on a CPU the host does, so all ranks launch in one order
            gather = self._gather(room)
            # First for the stream, on which the gather may have copied: its wait may read what was copied.
            return Work(self._gather_stream.device_work().wait, gather.wait)

    def all_gather_updated(self, *, lossless: bool = True) -> Work:
        """Publish new values of `own`; then renew the cache, or a `full` that persists.

        A transient `full` must have been resharded before; its next gather waits for the publication. If the transport
        is lossy, `full` is not gathered without `lossless`: call `all_gather` when the transport knows all new values.
        """
        self.wait_for_update()  # of an earlier update, if nothing has read the parameters since then
        if len(self._ranges.own) < len(self._ranges.rest):
            self._published = self.home.publish(self.rest, self._ranges, self._transport.publish, self._gather_stream)
        if self.cached is not None:
            self.wait_for_update()  # without streams `rest` is copied only now
            return self.home.fetch(self.rest, out=self.cached)
        return self.all_gather() if self.persists and (lossless or not self._transport.is_lossy) else Work()

    @torch.inference_mode(False)  # an update writes the copy, whatever mode an evaluation has
    def fetch(self) -> None:
        """Keep a copy of `rest` on the device until `evict`. The parameters must be unsharded."""
        self.cached = self._copy_rest(self._accelerator)

    def evict(self) -> None:
        """Free the copy on the device; the host has the same values."""
        self.cached = None

    def wait_for_update(self) -> None:
        """Wait for the publication, which reads and writes `rest`; at once if there is none."""
        if self._published is not None:
            self._published.wait()
            self._published = None

    def _gather(self, room: Tensor | None) -> Work:
        launch = partial(self._transport.gather, full=self.full, room=room)
        if self.cached is not None:
            return launch(self.cached)
        return self.home.gather(self.rest, self._in_full, launch)

    def _copy_rest(self, home: Home) -> Tensor:
        rest = self._in_full
        return home.new(TensorKind.PARAMETERS, rest.numel(), rest.dtype).copy_(rest)


class Bucket:
    """A range of a flat buffer that is communicated at once: its parameters, gradients and master weights."""

    def __init__(
        self,
        transport: Transport,
        params: ParamShard,
        grads: BucketGradient | None,
        slices: Sequence[Slice],
    ):
        """`grads` is None if the parameters are frozen; `slices` are the parts of parameters that this rank owns."""
        self.transport, self.ranges, self.params, self.slices = transport, transport.ranges, params, slices
        self._grads = grads
        self.master = params.own  # until an optimizer calls `place_master`
        self._master_home: Home | None = None

    @property
    def grads(self) -> BucketGradient:
        """The gradients of a bucket that is trainable."""
        assert self._grads is not None
        return self._grads

    @property
    def home(self) -> Home:
        """The home of the owned gradient, the master weights and the optimizer's states."""
        return self.grads.home

    def owned_part(self, own: Tensor, elements: range) -> Tensor:
        """Return a view of `elements` of the buffer, which this rank owns, from a tensor that covers its own ones."""
        return cut(own, elements, self.ranges.own.start)

    def place_master(self, home: Home) -> None:
        """Move the master weights to a home, in at least fp32, with their values.

        They share the memory of the owned parameters if dtype and home agree. The caller places the gradients and
        the optimizer's states too. Nothing changes if they are there: other optimizers may have views of them.
        """
        if home is self._master_home:
            return
        self._master_home = home
        owned, values = self.params.own, self.master
        dtype = torch.promote_types(values.dtype, torch.float32)
        self.master = owned
        if dtype is not owned.dtype or home is not self.params.home:
            self.master = home.new(TensorKind.MASTER, owned.numel(), dtype)
        self.master.copy_(values)  # returns early if both are the same memory

    def readable_master(self) -> Tensor:
        """Return the master weights; wait for the publication that writes the memory they are in, if it does."""
        if self.master is self.params.own:
            self.params.wait_for_update()
            self.params.home.settle()
        return self.master

    @property
    def casts_gradient(self) -> bool:
        """True if the optimizer needs the owned gradient in another type, that of the master weights."""
        return self.grads.path.types.accumulate is not self.master.dtype

    @property
    def master_may_be_outdated(self) -> bool:
        """True if the owned parameters may be written in place, and the master weights would not change with them."""
        return self.params.persists and self.master is not self.params.own


def slices_of(buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, Slice, Tensor]]:
    """Iterate over what this rank owns of some buckets: (bucket, part of a parameter, its master weights)."""
    for bucket in buckets:
        master = bucket.readable_master()
        for own in bucket.slices:
            yield bucket, own, bucket.owned_part(master, own.elements)


def take_changed(master: Tensor, values: Tensor) -> None:
    """Set the master weights that do not round to their parameters' `values` to these; the others keep their digits."""
    for old, new in zip(master.split(TAKEN_NUMEL), values.split(TAKEN_NUMEL), strict=True):
        torch.where(old.to(new.dtype) == new, old, new, out=old)
