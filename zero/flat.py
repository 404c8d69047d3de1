"""The parameters of one unit in one flat buffer: what is owned stays, what is full comes and goes."""

from collections.abc import Callable
from enum import Enum
from operator import attrgetter

import torch
from torch import Tensor, nn

from parallel.instruments.memory_tracker import TensorKind, tagged
from parallel.mesh import Axis, Handle
from zero.layout import Layout, Span, cut, overlap
from zero.offload.placement import Offload, Placement
from zero.stage import Lifetime


class Residence(Enum):
    OWNED = "only this rank's shard is in memory; parameters read as NaN"
    ARRIVING = "the full buffer is allocated and other ranks' shards are on their way"
    FULL = "the full buffer holds every parameter, and the parameters point into it"


class FlatParameters:
    """Parameters of one dtype that are all trainable or all frozen. `gather` brings them, `release` lets them go.

    `values_of` gives a parameter's initial values. Shards of transient parameters wait where `offload` places them, and
    may have copies `near`, on the accelerator; by default all stays on the device where it is. The full buffer is one
    storage for the whole run, resized between nothing and everything: what autograd saved during forward are views of
    that storage, and they must find the same weights there during backward.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        axis: Axis,
        lifetime: Lifetime,
        bucket_numel: int,
        values_of: Callable[[nn.Parameter], Tensor] = attrgetter("data"),
        offload: Offload | None = None,
    ):
        self.params, self.axis, self.lifetime = list(params.values()), axis, lifetime
        self._offload = offload = offload or Offload(self.params[0].device)
        is_transient = lifetime is Lifetime.TRANSIENT
        self.placement = offload.config.placement_of("parameters") if is_transient else Placement.ACCELERATOR
        self.layout = Layout.of({name: p.shape for name, p in params.items()}, axis.size, bucket_numel)
        self.full = tagged(
            TensorKind.PARAMETERS, self.params[0].data.new_zeros(self.layout.numel, device=offload.device)
        )
        self._full_buckets = [cut(self.full, bucket.elements) for bucket in self.layout.buckets]
        self._span_of = dict(zip(self.params, self.layout.spans, strict=True))
        self._present = {param: span.view(self.full) for param, span in self._span_of.items()}
        nothing = absent(self.full)
        self._absent = {param: nothing.expand(param.shape) for param in self.params}
        self._arrivals: list[Handle] = []
        self._residence = Residence.FULL
        for param, full in self._present.items():
            values = values_of(param)
            if values.numel() > 1 and not any(values.stride()):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is still sharded; pass `init=` to ZeroDataParallel"
                )
            full.copy_(values)
            param.data = full  # at once: whatever it was is freed before the next is fetched
        self.owned = [cut(self.full, bucket.shard(axis.rank)) for bucket in self.layout.buckets]
        if is_transient:
            self.owned = [self._copy_of(shard, self.placement) for shard in self.owned]
        self.masters = list(self.owned)  # what an optimizer updates; its finer copies, where it keeps some
        self.near: dict[int, Tensor] = {}  # copies on the accelerator of shards that are placed on the host
        self.release()

    @property
    def is_trainable(self) -> bool:
        return self.params[0].requires_grad

    @property
    def is_away(self) -> bool:
        """Whether a gather has collectives to launch."""
        return self._residence is Residence.OWNED

    def start_gather(self) -> None:
        if self.is_away:
            restore_storage(self.full)
            self._arrivals = [self._send(index) for index in range(len(self.owned))]
            self._residence = Residence.ARRIVING

    def gather(self) -> None:
        self.start_gather()
        if self._residence is Residence.ARRIVING:
            self._await_arrivals()
            self._point_params_at_full()
            self._residence = Residence.FULL

    def release(self) -> None:
        if self.lifetime is Lifetime.PERSISTENT or self.is_away:
            return
        if self._residence is Residence.ARRIVING:
            self._await_arrivals()
        for param in self.params:
            param.data = self._absent[param]
        free_storage(self.full)
        self._residence = Residence.OWNED

    def publish(self, index: int) -> Handle:
        """Owners have new values: a full buffer that persists receives them, any other copy is stale and goes."""
        self.release()
        if index in self.near:
            return self._offload.to_accelerator(self.owned[index], out=self.near[index])
        return self._send(index) if self.lifetime is Lifetime.PERSISTENT else Handle()

    def bring_near(self, index: int) -> None:
        """While full: keep this rank's shard of a bucket on the accelerator until `let_go`."""
        shard = cut(self.full, self.layout.buckets[index].shard(self.axis.rank))
        self.near[index] = self._copy_of(shard, Placement.ACCELERATOR)

    def let_go(self, index: int) -> None:
        del self.near[index]

    def assign(self, param: nn.Parameter, data: Axis) -> None:
        """While full: what the first rank of `data` has written into `param` is its value from now on, for all ranks.

        A master keeps its finer value wherever the rounded one is still the same.
        """
        span, full = self._span_of[param], self._present[param]
        if param.data_ptr() != full.data_ptr():  # `param.data` was replaced
            full.copy_(param.data)
            param.data = full
        data.broadcast(full).wait()
        for bucket, owned, master in zip(self.layout.buckets, self.owned, self.masters, strict=True):
            shard = bucket.shard(self.axis.rank)
            if part := overlap(span.elements, shard):
                new, fine = cut(self.full, part).to(master.device), cut(master, part, shard.start)
                fine.copy_(torch.where(fine.to(new.dtype) == new, fine, new.to(fine.dtype)))
                cut(owned, part, shard.start).copy_(new)

    def owned_pieces(self, index: int) -> list[tuple[nn.Parameter, range]]:
        """The parameters of which this rank owns a part in one bucket, and where in the owned shard that part lies."""
        owned = self.layout.buckets[index].shard(self.axis.rank)
        param_of: dict[Span, nn.Parameter] = dict(zip(self.layout.spans, self.params, strict=True))
        return [
            (param_of[span], range(part.start - owned.start, part.stop - owned.start))
            for span, part in self.layout.pieces(owned)
        ]

    def resident_tensors(self, placement: Placement) -> list[Tensor]:
        """What it occupies in one of the memories between steps; owned shards lie inside a full buffer that
        persists."""
        resident = [self.full] if self.lifetime is Lifetime.PERSISTENT else self.owned
        near = list(self.near.values()) if placement is Placement.ACCELERATOR else []
        return near + (resident if placement is self.placement else [])

    def _send(self, index: int) -> Handle:
        """Owners -> full buffer, one bucket; in place where the buffer persists, or the shard comes from the host."""
        out = self._full_buckets[index]
        if self.placement is Placement.ACCELERATOR or index in self.near:
            return self.axis.all_gather(self.near.get(index, self.owned[index]), out=out)
        shard = cut(self.full, self.layout.buckets[index].shard(self.axis.rank))
        return self._offload.to_accelerator(self.owned[index], shard, lambda: self.axis.all_gather(shard, out=out))

    def _copy_of(self, shard: Tensor, placement: Placement) -> Tensor:
        return self._offload.new(placement, TensorKind.PARAMETERS, shard.numel(), shard.dtype).copy_(shard)

    def _await_arrivals(self) -> None:
        for arrival in self._arrivals:
            arrival.wait()

    def _point_params_at_full(self) -> None:
        for param, full in self._present.items():
            param.data = full


def free_storage(tensor: Tensor) -> None:
    """Give back the memory of a tensor that fills its storage; it and views of it have none until `restore_storage`."""
    tensor.untyped_storage().resize_(0)


def restore_storage(tensor: Tensor) -> None:
    """Memory again where `free_storage` took it, with values that are void; else nothing happens."""
    if not tensor.untyped_storage().nbytes():
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def absent(like: Tensor) -> Tensor:
    """A number that, expanded to a parameter's shape, stands for values that are elsewhere (0-dim).

    It reads as NaN (an integer as 0), and writes raise. A read of freed memory would end the process.
    """
    number = like.new_full((), float("nan") if like.is_floating_point() else 0)
    # Most writes torch refuses by itself, since all elements share memory; fill_, zero_ and those to one element not.
    torch._C._set_throw_on_mutable_data_ptr(number)
    return number


def is_absent(data: Tensor) -> bool:
    """Whether a parameter holds `absent` instead of values. Waits for the device."""
    return data.numel() > 1 and not any(data.stride()) and bool(data.flatten()[0].isnan())
