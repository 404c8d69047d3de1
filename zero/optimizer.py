"""Any element-wise torch optimizer, run on the pieces of parameters that this rank owns.

Per step: norm of all gradients -> clip coefficient (a tensor) -> per bucket: cast, update, write back, publish.
Nothing here reads a tensor's value, so nothing waits for the device; the one exception is named (`_must_skip`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from parallel.instruments.memory_tracker import TensorKind, allocating
from parallel.mesh import Axis, Handle
from parallel.tensor.layers import split_dims
from zero.elementwise import BucketedOptimizer, Piece, probe_elementwise
from zero.engine import ZeroDataParallel
from zero.flat import FlatParameters
from zero.gradients import BucketGradient
from zero.layout import cut
from zero.loss_scale import LossScale
from zero.offload.placement import Offload, Placement

# A CPU adds fp32 squares one after the other: the norm of 17M elements in one piece is wrong by 2e-4.
NORM_CHUNK_NUMEL = 2**18
LEAST_ALLOCATION = 512  # bytes that CUDA's allocator gives for any smaller tensor


@dataclass(frozen=True, eq=False)
class OwnedBucket:
    """This rank's shard of one bucket, as the optimizer sees it; all of its states but the parameters lie together."""

    flat: FlatParameters
    index: int
    gradient: BucketGradient
    pieces: list[Piece]  # views of `master`

    @property
    def placement(self) -> Placement:
        return self.gradient.placement

    @property
    def master(self) -> Tensor:
        """At least fp32; the owned parameters themselves where they are that already, in the same memory."""
        return self.flat.masters[self.index]

    def write_back(self, offload: Offload) -> Handle:
        """Master -> owned parameters, wherever either lies -> full parameters."""
        owned, publish = self.flat.owned[self.index], partial(self.flat.publish, self.index)
        if self.placement is self.flat.placement:
            owned.copy_(self.master)  # returns early where both are the same memory
            return publish()
        if self.placement is Placement.HOST:
            return offload.to_accelerator(self.master, owned, publish)
        left = offload.to_host(self.master.to(owned.dtype), owned)
        return Handle(publish().wait, left.wait)

    @property
    def has_own_master(self) -> bool:
        return self.master.data_ptr() != self.flat.owned[self.index].data_ptr()


class ZeroOptimizer:
    """`groups` are torch's parameter groups, written with the model's own parameters.

    `tensor` is the axis along which the model itself is cut: the norm, and whether a step is skipped, hold for all of
    it, and parameters that `parallel.tensor.layers.split_dims` does not name, which every rank has, count once.

    A step with a non-finite gradient changes nothing and counts in `num_skipped`. Torch's fused Adam and AdamW see to
    that on the device; for any other optimizer the host waits for the flag. Multiply the loss by `loss_scale.scale`
    before backward.
    """

    def __init__(
        self,
        model: ZeroDataParallel,
        optimizer: type[torch.optim.Optimizer],
        groups: list[dict[str, Any]] | None = None,
        *,
        tensor: Axis | None = None,
        clip_norm: float = math.inf,
        loss_scale: LossScale | None = None,
        **settings: Any,
    ):
        self._model, self._clip_norm = model, clip_norm
        device = model.offload.device
        self.loss_scale = loss_scale or LossScale(device=device)
        self.num_skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._device_of = {Placement.ACCELERATOR: device, Placement.HOST: torch.device("cpu")}
        first = self._device_of[model.offload.config.placement_of("optimizer")]
        self.state_bytes_per_element = probe_elementwise(optimizer, settings, first)
        self._tensor = tensor or Axis.trivial("tensor")
        groups = groups or [{"params": list(model.module.parameters())}]
        group_of = _number_groups(groups, set(model.module.parameters()))
        self.buckets = [
            self._own_bucket(flat, index, gradient, group_of)
            for flat, gradients in model.reducer.buckets.items()
            for index, gradient in enumerate(gradients)
        ]
        pieces = [piece for bucket in self.buckets for piece in bucket.pieces]
        groups = [group | {"params": [p.param for p in pieces if p.group == n]} for n, group in enumerate(groups)]
        self._bucketed = BucketedOptimizer(optimizer(groups, **settings))
        split = {model.module.get_parameter(name) for name in split_dims(model.module)}
        self._elements_that_count = {
            bucket: [
                (param, elements)
                for param, elements in bucket.flat.owned_pieces(bucket.index)
                if self._tensor.rank == 0 or param in split
            ]
            for bucket in self.buckets
        }
        self._make_cast_buffers()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer, whose parameters are the owned pieces; set learning rates in its `param_groups`."""
        return self._bucketed.inner

    @torch.no_grad()
    def step(self, *, skip: Tensor | None = None, look: Callable[[], object] = lambda: None) -> Tensor:
        """Update the parameters; returns the global norm of the gradients before clipping, without the loss scale.

        `skip`: 0-dim, the same on all ranks; where it is not zero nothing is updated, as after an overflow. `look` is
        called while the owned gradients are there, reduced and not yet clipped.
        """
        self._model.complete_gradients()
        axes = self._model.shard_axis, self._model.replica_axis, self._tensor
        self._model.residency.before_update(axes)
        if self._masters_on(Placement.HOST):
            self._model.offload.arrive()
        look()
        norm = self._grad_norm()
        coefficient = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0) / self.loss_scale.scale
        found_inf = (~norm.isfinite()).float()
        skipped = found_inf if skip is None else torch.maximum(found_inf, skip.float())
        if not self._must_skip(skipped):
            self._update_all(coefficient, skipped)
        self.num_skipped.add_(skipped.long())
        self.loss_scale.update(found_inf)
        self._model.reducer.clear()
        self._model.residency.after_update(self, axes)
        return norm

    @property
    def norm_bytes(self) -> int:
        """Of the norms of one bucket's chunks."""
        return 2 * 4 * max((math.ceil(bucket.master.numel() / NORM_CHUNK_NUMEL) for bucket in self.buckets), default=0)

    def zero_grad(self) -> None:
        """Drop the gradients, as after a failed backward; `step` does so by itself."""
        self._model.reducer.clear()

    def bytes_to_place(self, bucket: OwnedBucket) -> int:
        """What `place` would bring to the accelerator, without the cast buffer."""
        states = [value for piece in bucket.pieces for value in self.inner.state.get(piece.param, {}).values()]
        moments = sum(max(value.nbytes, LEAST_ALLOCATION) for value in states if isinstance(value, Tensor))
        # An optimizer that has skipped all steps so far has made none yet.
        moments = max(moments, round(bucket.master.nbytes * self.state_bytes_per_element / 4))
        needs_own_master = bucket.master.dtype != bucket.gradient.dtype or bucket.flat.placement is Placement.HOST
        master = bucket.master.nbytes if needs_own_master else 0
        return moments + master + self._model.reducer.bytes_to_place(bucket.gradient)

    def place(self, bucket: OwnedBucket, placement: Placement) -> None:
        """Between steps: move a bucket's master weights, moments and owned gradient, of which only the values of the
        gradient are lost."""
        moved = self._master_of(bucket.flat, bucket.index, placement).copy_(bucket.master)
        bucket.flat.masters[bucket.index] = moved
        for piece in bucket.pieces:
            piece.param.data = moved[piece.elements.start : piece.elements.stop]
            state = self.inner.state.get(piece.param, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    to = self._model.offload.new(placement, TensorKind.MOMENTS, value.numel(), value.dtype)
                    state[name] = to.copy_(value)
                elif isinstance(value, Tensor) and self.inner.defaults.get("fused"):  # torch's step counters
                    state[name] = value.to(moved.device)
        self._model.reducer.place(bucket.gradient, placement)
        self._make_cast_buffers()

    def _grad_norm(self) -> Tensor:
        """Every element has one owner along the shard axis, and padding is zero. A bucket at a time (C_B).

        Buckets add up in one order, wherever they lie: a run that is resumed places them anew.
        """
        dtype = reduce(torch.promote_types, {bucket.master.dtype for bucket in self.buckets}, torch.float32)
        squares = self.loss_scale.scale.new_zeros((), dtype=dtype)
        for bucket in self.buckets:
            grads = self._gradients_that_count(bucket)
            if chunks := [chunk for grad in grads for chunk in grad.split(NORM_CHUNK_NUMEL)]:
                with allocating(TensorKind.OTHER, on_host=bucket.placement is Placement.HOST):
                    square = torch.stack(list(torch._foreach_norm(chunks, 2, dtype))).square().sum()
                squares.add_(square.to(squares.device))
        for axis in (self._model.shard_axis, self._tensor):
            axis.all_reduce(squares, out=squares).wait()
        return squares.sqrt() / self.loss_scale.scale

    def _gradients_that_count(self, bucket: OwnedBucket) -> list[Tensor]:
        """A bucket's owned gradients, without those of replicated parameters on all tensor ranks but the first."""
        if self._tensor.rank == 0:
            return [bucket.gradient.owned]
        return [gradient for _, gradient in self.pieces_that_count(bucket)]

    def pieces_that_count(self, bucket: OwnedBucket) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The same by parameter, for whoever looks at the gradients in a step."""
        for param, elements in self._elements_that_count[bucket]:
            yield param, cut(bucket.gradient.owned, elements)

    def _update_all(self, coefficient: Tensor, found_inf: Tensor) -> None:
        self._bucketed.begin_round()
        published = []
        for placement in Placement:
            if buckets := self._masters_on(placement):
                here = self._device_of[placement]
                published += self._update_at(buckets, coefficient.to(here), found_inf.to(here))
        self._bucketed.end_round()
        for handle in published:
            handle.wait()

    def _update_at(self, buckets: list[OwnedBucket], coefficient: Tensor, found_inf: Tensor) -> list[Handle]:
        """Of buckets in one memory, where the flag and the coefficient are too."""
        if self._takes_found_inf:
            self.inner.found_inf = found_inf  # type: ignore[attr-defined]
        return [self._update(bucket, coefficient) for bucket in buckets]

    def _update(self, bucket: OwnedBucket, coefficient: Tensor) -> Handle:
        grad = bucket.gradient.owned
        if grad.dtype != bucket.master.dtype:
            grad = self.cast_buffers[bucket.placement][: grad.numel()].copy_(grad)
        on_host = bucket.placement is Placement.HOST
        with allocating(TensorKind.MOMENTS, on_host=on_host):  # a torch optimizer makes them in its first step
            self._bucketed.step(bucket.pieces, grad.mul_(coefficient))
        return bucket.write_back(self._model.offload)

    @property
    def _takes_found_inf(self) -> bool:
        # Fused SGD says so too, but a skipped first step leaves it with a momentum buffer of whatever was in memory.
        return isinstance(self.inner, (torch.optim.Adam, torch.optim.AdamW)) and bool(self.inner.defaults["fused"])

    def _must_skip(self, found_inf: Tensor) -> bool:
        """Reads the flag, hence waits for the device, only where the optimizer cannot take it as a tensor."""
        return not self._takes_found_inf and bool(found_inf)

    def _masters_on(self, placement: Placement) -> list[OwnedBucket]:
        return [bucket for bucket in self.buckets if bucket.placement is placement]

    def _make_cast_buffers(self) -> None:
        """Gradients stay in the parameters' type; one bucket at a time is cast to the master's, where it lies."""
        self.cast_buffers: dict[Placement, Tensor] = {}
        for placement in Placement:
            if cast := [w.master for w in self._masters_on(placement) if w.gradient.dtype != w.master.dtype]:
                largest = max(cast, key=Tensor.numel)
                new = self._model.offload.new
                self.cast_buffers[placement] = new(placement, TensorKind.BUFFERS, largest.numel(), largest.dtype)

    def _own_bucket(
        self, flat: FlatParameters, index: int, gradient: BucketGradient, group_of: dict[nn.Parameter, int]
    ) -> OwnedBucket:
        """Parameters in no group keep their values, as in torch."""
        master = flat.masters[index] = self._master_of(flat, index, gradient.placement)
        pieces = [
            Piece(nn.Parameter(master[elements.start : elements.stop]), elements, group_of[param])
            for param, elements in flat.owned_pieces(index)
            if param in group_of
        ]
        return OwnedBucket(flat, index, gradient, pieces)

    def _master_of(self, flat: FlatParameters, index: int, placement: Placement) -> Tensor:
        owned = flat.owned[index]
        dtype = torch.promote_types(owned.dtype, torch.float32)
        if owned.dtype is dtype and flat.placement is placement:
            return owned
        return self._model.offload.new(placement, TensorKind.MASTER, owned.numel(), dtype).copy_(owned)


def _number_groups(groups: list[dict[str, Any]], known: set[nn.Parameter]) -> dict[nn.Parameter, int]:
    """The group of every parameter. Raises ValueError for a parameter in two groups, or of another model."""
    group_of: dict[nn.Parameter, int] = {}
    for number, group in enumerate(groups):
        for param in group["params"]:
            if param not in known:
                raise ValueError(
                    f"parameter group {number} has a tensor of shape {tuple(param.shape)} not of this model"
                )
            if param in group_of:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is in groups {group_of[param]} and {number}"
                )
            group_of[param] = number
    return group_of
