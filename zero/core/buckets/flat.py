"""A flat buffer: parameters of one unit that have one dtype and one lifetime, all trainable or all frozen.

If the buffer is transient, only its owned shards stay allocated, and the full buffer is filled and freed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel.autograd_internals import DisableTorchFunction, forbid_writes
from parallel.memory_kinds import TensorKind, tagged
from parallel.mesh import Work
from parallel.torch_internals import are_the_same_elements
from zero.core.buckets.bucket import Bucket, ParamShard, take_changed
from zero.core.buckets.bucket_gradient import BucketGradient
from zero.core.buckets.guard import ParameterGuard, set_raw_data
from zero.core.memory.staging import free_storage, restore_storage
from zero.core.memory.streams import SideStream
from zero.core.partition.config import PartitionConfig
from zero.core.partition.layout import BucketRange, Layout, Slice, cut, overlap
from zero.core.partition.stage import Lifetime
from zero.core.protocols.home import Homes
from zero.core.protocols.transport import Transport


@dataclass(frozen=True)
class FlatContext:
    """The settings and objects that all flat buffers of an engine share."""

    config: PartitionConfig
    bucket_numel: int
    homes: Homes
    guard: ParameterGuard
    gather_stream: SideStream
    """The stream of gathers that wait for publications."""
    param_dtype: torch.dtype | None = None
    """The type of floating-point parameters, of which the master weights keep the initial digits; None: their own."""

    def dtype_of(self, param: Tensor) -> torch.dtype:
        """Return the type of a parameter's buffer."""
        return self.param_dtype or param.dtype if param.is_floating_point() else param.dtype


class Views(NamedTuple):
    """The tensors that a parameter refers to: its part of the full buffer, or a placeholder while that is freed."""

    full: Tensor
    sharded: Tensor


class FlatParameters:
    """Parameters of one dtype, all trainable or all frozen, as views of one flat buffer that is cut into buckets.

    `values_of` returns a parameter's initial values. The full buffer is one storage for the whole run, resized between
    its size and zero: tensors that autograd saved during forward are views of this storage, and must read the same
    weights from it in backward.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        lifetime: Lifetime,
        values_of: Callable[[nn.Parameter], Tensor],
        transport: Transport,
        context: FlatContext,
    ):
        self.lifetime, self.transport, self._guard = lifetime, transport, context.guard
        shapes = {name: param.shape for name, param in params.items()}
        alignment, numel = context.config.alignment, context.bucket_numel
        num_shards, num_parts, grain = transport.num_shards, transport.num_parts, transport.grain(alignment)
        self.layout = Layout.of(shapes, num_shards, numel, alignment, num_parts, grain)
        first = next(iter(params.values())).data
        full = first.new_zeros(self.layout.numel, dtype=context.dtype_of(first), device=context.homes.device)
        self.full = tagged(TensorKind.PARAMETERS, full)
        self._param_of = dict(zip(self.layout.spans, params.values(), strict=True))
        placeholder = absent(full)
        self._views = {p: Views(span.view(full), placeholder.expand(p.shape)) for span, p in self._param_of.items()}
        shards = [bucket.ranges(transport.owners.rank).own for bucket in self.layout.buckets]
        is_cast = first.dtype is not full.dtype and params[next(iter(params))].requires_grad
        masters = [full.new_zeros(len(shard), dtype=first.dtype) for shard in shards if is_cast]
        for span, param in self._param_of.items():
            values, view = values_of(param), self._views[param].full
            view.copy_(values)
            for shard, master in zip(shards, masters, strict=False):
                if owned := overlap(span.elements, shard):
                    cut(master, owned, shard.start).copy_(cut(values.flatten(), owned, span.elements.start))
            del values  # and the parameter's own memory: both are freed before the next values are made
            set_raw_data(param, view)
            self._guard.guard(param)
        self._versions = self.versions()
        self.buckets = [self._bucket(elements, context) for elements in self.layout.buckets]
        for bucket, master in zip(self.buckets, masters, strict=False):
            bucket.master = master
        self._is_lossless = True  # the full buffer has all digits of the parameters
        self._gathers: list[Work] = []  # that are filling the full buffer
        self.is_sharded = False  # the full buffer is freed, and the parameters, which are views of it, have no values
        self.reshard()

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order of the layout."""
        return list(self._views)

    @property
    def is_trainable(self) -> bool:
        return self.params[0].requires_grad

    @property
    def unsharding_bytes(self) -> int:
        """The bytes that unsharding allocates: the full buffer, and the transport's room until it is filled."""
        return self.full.numel() * (self.full.element_size() + self.transport.room_itemsize)

    def start_unshard(self, *, lossless: bool = False) -> None:
        """Allocate the full buffer and launch its all-gathers, if it is sharded; with `lossless`, of all digits."""
        if self.is_sharded:
            restore_storage(self.full)
            self._gathers = [bucket.params.all_gather(lossless=lossless) for bucket in self.buckets]
            self.is_sharded, self._is_lossless = False, lossless or not self.transport.is_lossy

    def unshard(self) -> None:
        """Make the parameters readable by what is launched after this."""
        self.start_unshard()
        if self._gathers:
            self._wait_for_gathers()
            for param, views in self._views.items():
                self._guard.guard(param)  # first: the data of a watched parameter cannot be set
                set_raw_data(param, views.full)
            self._versions = self.versions()

    def gather_lost_digits(self) -> None:
        """Gather again what has lost digits, for readers that need all of them. It must be unsharded."""
        if not self._is_lossless:
            if self.lifetime is Lifetime.TRANSIENT and self._versions != self.versions():
                self._check_lossless()
            for bucket in self.buckets:
                bucket.params.all_gather().wait()
            self._is_lossless = True

    def as_sent(self, elements: range) -> Tensor:
        """Return values of the full buffer, which must persist, as all ranks have them: without lost digits."""
        values = cut(self.full, elements)
        if self._is_lossless:
            return values
        values = values.clone()
        for bucket in self.buckets:
            if part := overlap(bucket.ranges.elements, elements):
                bucket.transport.round_trip(cut(values, part, elements.start), part)
        return values

    def start_lossy_gathers(self, buckets: Iterable[Bucket]) -> dict[Bucket, Work]:
        """Launch the gathers of some buckets of updated parameters that persist; digits may be lost."""
        self._is_lossless = False
        return {bucket: bucket.params.all_gather(lossless=False) for bucket in buckets}

    def publish_loaded(self) -> None:
        """Send owned values that were loaded, with all digits, and wait for them."""
        for bucket in self.buckets:
            bucket.params.all_gather_updated().wait()
        self._is_lossless = True

    def slices(self, elements: range) -> Iterator[Slice]:
        """Iterate over the parts of parameters in a range of the buffer."""
        return (Slice(self._param_of[span], span, own) for span, own in self.layout.spans_in(elements))

    def reshard(self) -> None:
        """Free the full buffer, unless it persists. What was written to it is kept, each element by its owner."""
        if self.lifetime is Lifetime.PERSISTENT or self.is_sharded:
            return
        self.take_replaced()
        if self._gathers:
            self._wait_for_gathers()  # before the memory that they write is freed
        elif self._versions != self.versions():
            self._check_lossless()
            self.keep_writes()
        for param, views in self._views.items():
            self._guard.guard(param)
            set_raw_data(param, views.sharded)
            self._guard.watch(param)
        free_storage(self.full)
        self.is_sharded = True

    def watch_reads(self, is_watched: bool) -> None:
        """Have reads of transient parameters reported while they are unsharded, or stop, and keep what was written."""
        if self.lifetime is Lifetime.PERSISTENT or self.is_sharded:
            return
        if not is_watched:
            self.take_replaced()
            self.keep_writes()
        for param in self.params:
            self._guard.watch(param) if is_watched else self._guard.guard(param)

    def unwrap(self, device: torch.device | None) -> None:
        """Give the parameters their values in memory of their own. They must be unsharded."""
        self.take_replaced()
        for param, views in self._views.items():
            set_raw_data(param, views.full.to(device or self.full.device, copy=True))
            self._guard.release(param)
        free_storage(self.full)

    def end(self) -> None:
        """Let go of the parameters when their engine ends: those that are sharded raise if they are read."""
        self._wait_for_gathers()
        for bucket in self.buckets:
            bucket.params.wait_for_update()
        for param in self._views:
            self._guard.end(param) if self.is_sharded else self._guard.release(param)

    # [Note: replacing] `param.data = values` changes no version in torch, and what autograd has saved keeps the values
    # of before: weights may be replaced for a forward and restored before its backward. So the parameter refers to a
    # copy, and the buffer is not written, until the step or a checkpoint needs the values or, if they are transient,
    # until they are resharded. From then on a backward that would read the values of before raises.

    @torch.no_grad()
    def replace(self, param: nn.Parameter, values: Tensor) -> None:
        """Let a parameter, which must be unsharded, refer to a copy of `values`, or to the buffer if they are there."""
        view = self._views[param].full
        self._guard.replaced.discard(param)
        if not are_the_same_elements(values, view):
            view = torch.empty_like(view).copy_(values)
            self._guard.replaced.add(param)
        with DisableTorchFunction():  # it may be watched
            set_raw_data(param, view)

    @torch.no_grad()
    def take_replaced(self) -> None:
        """Copy the values of replaced parameters to the buffer, of which they become views again."""
        for param in [param for param in self._guard.replaced if param in self._views]:
            with DisableTorchFunction():
                set_raw_data(param, self._views[param].full.copy_(param))
            torch.autograd.graph.increment_version(param)
            self._guard.replaced.discard(param)

    def keep_writes(self) -> None:
        """Take over what this rank has written to its own shards of the full buffer, which must be unsharded.

        If ranks keep more than they own, what a rank alone writes outside its own part is seen by those that gather
        from it until the next update, which publishes the owners' values.
        """
        for bucket in self.buckets:
            self._take_over(bucket, bucket.ranges.rest)

    def assign(self, param: nn.Parameter) -> None:
        """Broadcast the values of `param` on the first rank, and update what ranks keep; it must be unsharded."""
        self.take_replaced()
        self.transport.axis.broadcast(self._views[param].full).wait()
        of_param = next(span.elements for span, owner in self._param_of.items() if owner is param)
        for bucket in self.buckets:
            if elements := overlap(of_param, bucket.ranges.rest):
                self._take_over(bucket, elements)

    def _take_over(self, bucket: Bucket, elements: range) -> None:
        """Copy `elements` of the full buffer to the shard; a master weight that rounds to its value stays."""
        if owned := overlap(elements, bucket.ranges.own):
            master = bucket.owned_part(bucket.master, owned)
            take_changed(master, cut(self.full, owned).to(master.device))
        for shard in filter(torch.is_tensor, (bucket.params.rest, bucket.params.cached)):
            cut(shard, elements, bucket.ranges.rest.start).copy_(cut(self.full, elements))

    def versions(self) -> list[object]:
        """Return a list that differs from one of before if parameters may have been written since then.

        A collective or NumPy writes without a new version, and is noticed only if it was given `.data`.
        """
        exposed = self._guard.exposed
        return [object() if exposed and param in exposed else param._version for param in self._views]

    def _bucket(self, of_bucket: BucketRange, context: FlatContext) -> Bucket:
        elements = of_bucket.elements
        slices = list(self.slices(elements))
        transport = self.transport.bind(of_bucket.ranges(self.transport.owners.rank), slices)
        params = ParamShard(cut(self.full, elements), transport, context.homes, self.lifetime, context.gather_stream)
        grads = None
        if self.is_trainable:
            parts = {each.param: each.elements for each in slices}
            types, gaps = context.config.gradient_types(self.full.dtype), list(self.layout.gaps(elements))
            grads = BucketGradient(transport, parts, gaps, types, context.config.policy, context.homes)
            self._guard.gradients.append(grads)
        return Bucket(transport, params, grads, list(self.slices(transport.ranges.own)))

    def _check_lossless(self) -> None:
        """Raise RuntimeError, once, if parameters were written that have lost digits: no rank knows new scales."""
        if not self._is_lossless:
            self._versions = self.versions()
            raise RuntimeError(
                f"{self._guard.names[self.params[0]]}, or a weight beside it, is gathered by {self.transport.name} and "
                "was written outside gathered(), where no rank knows its new scale; write it in "
                "`with model.gathered():` on all ranks"
            )

    def _wait_for_gathers(self) -> None:
        for gather in self._gathers:
            gather.wait()
        self._gathers = []


def absent(like: Tensor) -> Tensor:
    """Return a scalar that, expanded to a parameter's shape, stands for values that are sharded.

    It reads as NaN (an integer as 0), and writes raise. A read of freed memory would crash the process.
    """
    scalar = like.new_full((), float("nan") if like.is_floating_point() else 0)
    forbid_writes(scalar)
    return scalar


def is_absent(data: Tensor) -> bool:
    """Return whether a parameter holds `absent` instead of values. Blocks the host until the device has finished."""
    return data.numel() > 1 and not any(data.stride()) and bool(data.flatten()[0].isnan())
