"""A flat buffer: parameters of one unit that have one dtype and one lifetime, all trainable or all frozen.

If the buffer is transient, only its owned shards stay allocated, and the full buffer is filled and freed.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from operator import attrgetter

import torch
from torch import Tensor, nn

from parallel.instruments.memory_tracker import TensorKind, tagged
from parallel.mesh import Axis, Handle
from zero.bucket import Bucket, GradShard, ParamShard
from zero.layout import BucketRange, Layout, cut, overlap
from zero.offload.placement import Offload
from zero.stage import Lifetime, ShardingPolicy
from zero.staging import free_storage, restore_storage
from zero.torch_internals import forbid_writes


class FullState(Enum):
    """The state of the full buffer, and of the parameters, which are views of it."""

    SHARDED = "only owned shards are allocated, and the parameters read as NaN"
    UNSHARDING = "the full buffer is allocated, and all-gathers are filling it"
    UNSHARDED = "the full buffer holds every parameter"


class FlatParameters:
    """Parameters of one dtype, all trainable or all frozen, as views of one flat buffer that is cut into buckets.

    `values_of` returns a parameter's initial values. The full buffer is one storage for the whole run, resized between
    its size and zero: tensors that autograd saved during forward are views of this storage, and must read the same
    weights from it in backward.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        axis: Axis,
        lifetime: Lifetime,
        bucket_numel: int,
        policy: ShardingPolicy,
        values_of: Callable[[nn.Parameter], Tensor] = attrgetter("data"),
        offload: Offload | None = None,
    ):
        self.params, self.axis, self.lifetime = list(params.values()), axis, lifetime
        offload = offload or Offload(self.params[0].device)
        self.layout = Layout.of({name: p.shape for name, p in params.items()}, axis.size, bucket_numel)
        full = self.params[0].data.new_zeros(self.layout.numel, device=offload.device)
        self.full = tagged(TensorKind.PARAMETERS, full)
        self._span_of = dict(zip(self.params, self.layout.spans, strict=True))
        self._param_of = {span: param for param, span in self._span_of.items()}
        self._views = {param: span.view(full) for param, span in self._span_of.items()}
        placeholder = absent(full)
        self._placeholders = {param: placeholder.expand(param.shape) for param in self.params}
        for param, view in self._views.items():
            view.copy_(values_of(param))
            param.data = view  # at once: the parameter's own memory is freed before the next values are made
        self.buckets = [self._bucket(stretch, policy, offload) for stretch in self.layout.buckets]
        self._gathers: list[Handle] = []
        self._state = FullState.UNSHARDED
        self.reshard()

    @property
    def is_trainable(self) -> bool:
        return self.params[0].requires_grad

    @property
    def is_sharded(self) -> bool:
        """True if the full buffer is freed: `start_unshard` would launch all-gathers."""
        return self._state is FullState.SHARDED

    def start_unshard(self) -> None:
        """Allocate the full buffer and launch its all-gathers, if it is sharded."""
        if self.is_sharded:
            restore_storage(self.full)
            self._gathers = [bucket.params.all_gather() for bucket in self.buckets]
            self._state = FullState.UNSHARDING

    def unshard(self) -> None:
        """Make the parameters readable by what is launched after this."""
        self.start_unshard()
        if self._state is FullState.UNSHARDING:
            self._wait_for_gathers()
            for param, view in self._views.items():
                param.data = view
            self._state = FullState.UNSHARDED

    def reshard(self) -> None:
        """Free the full buffer, unless it persists."""
        if self.lifetime is Lifetime.PERSISTENT or self.is_sharded:
            return
        if self._state is FullState.UNSHARDING:
            self._wait_for_gathers()  # before the memory that they write is freed
        for param, placeholder in self._placeholders.items():
            param.data = placeholder
        free_storage(self.full)
        self._state = FullState.SHARDED

    def assign(self, param: nn.Parameter, data: Axis) -> None:
        """Broadcast the values of `param` on the first rank of `data`, and update the shards; it must be unsharded.

        A master weight that rounds to the new value keeps its own.
        """
        span, full = self._span_of[param], self._views[param]
        if param.data_ptr() != full.data_ptr():  # `param.data` was replaced
            full.copy_(param.data)
            param.data = full
        data.broadcast(full).wait()
        for bucket in self.buckets:
            if part := overlap(span.elements, bucket.shard):
                master = bucket.owned_part(bucket.master, part)
                new = cut(self.full, part).to(master.device)
                master.copy_(torch.where(master.to(new.dtype) == new, master, new.to(master.dtype)))
                bucket.owned_part(bucket.params.owned, part).copy_(new)

    def params_in(self, elements: range) -> Iterator[tuple[nn.Parameter, range]]:
        """Iterate over the parameters that have elements in `elements` of the buffer, each with its part of them."""
        return ((self._param_of[span], part) for span, part in self.layout.spans_in(elements))

    def _bucket(self, stretch: BucketRange, policy: ShardingPolicy, offload: Offload) -> Bucket:
        elements, shard = stretch.elements, stretch.shard(self.axis.rank)
        own = range(shard.start - elements.start, shard.stop - elements.start)
        params = ParamShard(cut(self.full, elements), own, self.axis, offload, self.lifetime)
        parts, gaps = dict(self.params_in(elements)), list(self.layout.gaps(elements))
        grads = GradShard(elements, shard, parts, gaps, self.full.dtype, policy, offload) if self.is_trainable else None
        return Bucket(elements, shard, params, grads, offload)

    def _wait_for_gathers(self) -> None:
        for gather in self._gathers:
            gather.wait()


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
