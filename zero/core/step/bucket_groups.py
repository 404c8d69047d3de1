"""The buckets that are updated together, and the all-gathers of updated parameters."""

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial

from torch import Tensor

from parallel.autograd_internals import foreach_copy_
from parallel.memory_kinds import TensorKind
from parallel.mesh import Work
from zero.core.buckets.bucket import Bucket, take_changed
from zero.core.buckets.flat import FlatParameters
from zero.core.partition.stage import Lifetime
from zero.core.protocols.extension import Extensions
from zero.core.protocols.home import Home

GROUP_DIVISOR = 8  # shards are updated together up to 1/8 of the elements of the largest bucket


class BucketGroups:
    """The buckets that are updated together in each memory, and one buffer there for the casts of a group's gradients.

    The shards of many ranks are so small that the launch of a kernel takes longer than the kernel.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        buckets: Sequence[Bucket],
        assembled: Container[Bucket],
    ):
        """`assembled`: the buckets whose update ends after its messages; they are grouped by themselves."""
        self._flats, self.buckets, self._assembled = flats, buckets, assembled
        self._versions: dict[FlatParameters, list[object]] = {}  # when master weights and parameters were equal
        self._published: dict[Bucket, Work] = {}  # gathers of updated parameters that nobody has waited for
        self._limit = max(len(bucket.ranges.elements) for bucket in buckets) // GROUP_DIVISOR
        self.regroup()

    @property
    def homes(self) -> Iterable[Home]:
        """The homes of the buckets, the accelerator first."""
        return self._groups

    def settle(self) -> None:
        """Block the host until all copies from and to the homes have ended."""
        for home in self._groups:
            home.settle()

    def take_written(self) -> None:
        """Give master weights the values of parameters that were written in place since `expect_equal`.

        They may have been if they have new versions, or if their `.data` has ever been read. The values are compared on
        the device of the master weights, and the host does not know the result. The caller has made the computation
        wait for all updates: so a copy of master weights to the accelerator has ended when their parameters are read.
        """
        flats = [flat for flat in self._copied_flats() if self._versions.get(flat) != flat.versions()]
        written = {bucket for flat in flats for bucket in flat.buckets}
        for home, groups in self._groups.items():
            buckets = [bucket for group in groups for bucket in group]
            outdated = [b for b in buckets if b in written and b.master_may_be_outdated]
            owned = home.read(bucket.params.own for bucket in outdated)
            for bucket, values in zip(outdated, owned, strict=True):
                with home.allocating(TensorKind.OTHER):
                    take_changed(bucket.master, values)

    def expect_equal(self) -> None:
        """Expect master weights and parameters to be equal now, as after an update."""
        self._versions = {flat: flat.versions() for flat in self._copied_flats()}

    def regroup(self) -> None:
        """Group the buckets again after some of them have moved, and allocate the buffers."""
        homes = sorted({bucket.home: None for bucket in self.buckets}, key=lambda home: home.is_apart)
        self._groups: dict[Home, list[list[Bucket]]] = {}
        self.cast_buffers: dict[Home, Tensor] = {}
        for home in homes:
            groups = self._groups[home] = self._consecutive([b for b in self.buckets if b.home is home])
            if cast := [group for group in groups if group[0].casts_gradient]:
                largest = max(cast, key=_owned_numel)
                dtype = largest[0].master.dtype
                self.cast_buffers[home] = home.new(TensorKind.BUFFERS, _owned_numel(largest), dtype)

    def of(self, home: Home, *, assembled: bool) -> Iterator[list[Bucket]]:
        """Iterate over the groups of one home in the order of the layout, with assembled pieces or without."""
        return (group for group in self._groups[home] if (group[0] in self._assembled) is assembled)

    def cast(self, grads: list[Tensor], home: Home) -> list[Tensor]:
        """Return copies of the gradients of a group, one after the other in the buffer."""
        numels = [grad.numel() for grad in grads]
        copies = list(self.cast_buffers[home][: sum(numels)].split(numels))
        foreach_copy_(copies, grads)
        return copies

    def publish(self, bucket: Bucket) -> None:
        """Copy master weights to the owned parameters, wherever either is, and all-gather what was updated."""
        params, master = bucket.params, bucket.master
        if bucket.home is params.home:
            params.own.copy_(master)  # returns early if both are the same memory
            gather = params.all_gather_updated(lossless=False)
        elif not params.home.is_apart:
            publish = partial(params.all_gather_updated, lossless=False)
            gather = bucket.home.fetch(master, params.own, publish)
        else:
            copied = params.home.store(master.to(params.own.dtype), params.own)
            gather = Work(params.all_gather_updated(lossless=False).wait, copied.wait)
        self._published[bucket] = gather

    def finish_publishing(self, extensions: Extensions) -> None:
        """Wait for the gathers, unless they are of parameters that persist, and an extension takes them.

        Gathers that may lose digits are launched now, when their transports know all new values.
        """
        published, self._published = self._published, {}
        for flat in self._flats:
            gathers = {bucket: published[bucket] for bucket in flat.buckets if bucket in published}
            if flat.transport.is_lossy and flat.lifetime is Lifetime.PERSISTENT:
                for gather in gathers.values():
                    gather.wait()
                gathers = flat.start_lossy_gathers(gathers)
            of_params = [(list(bucket.grads.parts), gather) for bucket, gather in gathers.items()]
            if not (flat.lifetime is Lifetime.PERSISTENT and extensions.take_gathers(of_params)):
                for gather in gathers.values():
                    gather.wait()

    def _copied_flats(self) -> Iterator[FlatParameters]:
        """Iterate over the buffers of which master weights are copies."""
        return (flat for flat in self._flats if any(bucket.master_may_be_outdated for bucket in flat.buckets))

    def _consecutive(self, buckets: Iterable[Bucket]) -> list[list[Bucket]]:
        """Group buckets of the same types, with at most `_limit` owned elements unless a bucket has more."""
        groups: list[list[Bucket]] = []
        last_kind = None
        for bucket in buckets:
            kind = bucket.casts_gradient, bucket.master.dtype, bucket in self._assembled
            if kind == last_kind and _owned_numel([*groups[-1], bucket]) <= self._limit:
                groups[-1].append(bucket)
            else:
                groups.append([bucket])
            last_kind = kind
        return groups


def _owned_numel(buckets: Iterable[Bucket]) -> int:
    return sum(bucket.master.numel() for bucket in buckets)
