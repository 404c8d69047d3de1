"""Any element-wise torch optimizer, run on the shards that this rank owns.

    grad_norm    the norm of all gradients, a tensor, and from it the clip coefficient, a tensor
    update       bucket by bucket: cast the gradient, step the torch optimizer, write the owned parameters
    publish      bucket by bucket, while the next one is updated: all-gather the updated parameters

Nothing here reads a tensor's value, so the host never waits for the device; the one exception is `_must_skip`.
"""

import math
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from parallel.instruments.memory_tracker import TensorKind, allocating
from parallel.mesh import Axis, Handle
from parallel.tensor.layers import split_dims
from zero.bucket import Bucket
from zero.elementwise import BucketedOptimizer, Piece, probe_elementwise
from zero.engine import ZeroDataParallel
from zero.loss_scale import LossScale
from zero.offload.placement import Placement
from zero.torch_internals import foreach_norm

# A CPU adds fp32 squares one after the other: the norm of 17M elements in one piece is wrong by 2e-4.
NORM_CHUNK_NUMEL = 2**18
LEAST_ALLOCATION = 512  # bytes that CUDA's allocator gives to any smaller tensor


class ZeroOptimizer:
    """A torch optimizer whose parameters are the pieces of the model's parameters that this rank owns.

    `groups` are torch's parameter groups, written with the model's own parameters; parameters in no group keep their
    values, as in torch. `tensor` is the axis along which the model itself is cut: the norm, and whether a step is
    skipped, hold for all of it, and parameters that `split_dims` does not name, which every tensor rank has, count
    once.

    A step with a non-finite gradient changes nothing and counts in `num_skipped`. Torch's fused Adam and AdamW skip it
    on the device; for any other optimizer the host waits for the flag. Multiply the loss by `loss_scale.scale` before
    backward. Raises ConfigError if the optimizer is not element-wise.
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
        self._reducer, self._planner, self._offload = model.reducer, model.planner, model.offload
        self._flats = [flat for flat in model.flats if flat.is_trainable]
        self._tensor, self._clip_norm = tensor or Axis.trivial("tensor"), clip_norm
        self._norm_axes = model.shard_axis, self._tensor
        self._axes = model.shard_axis, model.replica_axis, self._tensor
        device = self._offload.device
        self.loss_scale = loss_scale or LossScale(device=device)
        self.num_skipped = torch.zeros((), dtype=torch.int64, device=device)
        first = self._offload.device_of(self._offload.config.placement_of("optimizer"))
        self.state_bytes_per_element = probe_elementwise(optimizer, settings, first)
        groups = groups or [{"params": list(model.module.parameters())}]
        group_of = _number_groups(groups, set(model.module.parameters()))
        owned = {bucket: list(flat.pieces(bucket.shard)) for flat in self._flats for bucket in flat.buckets}
        self._pieces = {bucket: _pieces(bucket, owned[bucket], group_of) for bucket in owned}
        pieces = [piece for pieces in self._pieces.values() for piece in pieces]
        groups = [group | {"params": [p.param for p in pieces if p.group == n]} for n, group in enumerate(groups)]
        self._bucketed = BucketedOptimizer(optimizer(groups, **settings))
        split = {model.module.get_parameter(name) for name in split_dims(model.module)}
        self._counted = {
            bucket: [(param, part) for param, part in owned[bucket] if self._tensor.rank == 0 or param in split]
            for bucket in self.buckets
        }
        self._make_cast_buffers()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer, whose parameters are the owned pieces; set learning rates in its `param_groups`."""
        return self._bucketed.inner

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of all trainable parameters, in the order of the layout."""
        return list(self._pieces)

    def pieces_of(self, bucket: Bucket) -> list[Piece]:
        """Return the owned pieces of parameters in a bucket: views of its master weights."""
        return self._pieces[bucket]

    @torch.no_grad()
    def step(self, *, skip: Tensor | None = None, gradient_hook: Callable[[], object] = lambda: None) -> Tensor:
        """Update the parameters; return the global norm of the gradients before clipping, without the loss scale.

        `skip`: 0-dim, the same on all ranks; if it is not zero nothing is updated, as after an overflow.
        `gradient_hook` is called while the owned gradients are reduced and not yet clipped.
        """
        self._reducer.complete()
        self._planner.before_update(self._axes)
        if self._buckets_on(Placement.HOST):
            self._offload.synchronize()  # before the host reads gradients that were copied to it
        gradient_hook()
        norm = self._grad_norm()
        coefficient = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0) / self.loss_scale.scale
        found_inf = (~norm.isfinite()).float()
        skipped = found_inf if skip is None else torch.maximum(found_inf, skip.float())
        if not self._must_skip(skipped):
            self._update_all(coefficient, skipped)
        self.num_skipped.add_(skipped.long())
        self.loss_scale.update(found_inf)
        self._reducer.clear()
        self._planner.after_update(self._axes, self.buckets, self.bytes_to_place, self.place)
        return norm

    def zero_grad(self) -> None:
        """Discard the gradients, as after a backward that failed; `step` does so by itself."""
        self._reducer.clear()

    @property
    def norm_bytes(self) -> int:
        """Memory of the norms of one bucket's chunks."""
        return 2 * 4 * max((math.ceil(bucket.master.numel() / NORM_CHUNK_NUMEL) for bucket in self.buckets), default=0)

    def counted_gradients(self, bucket: Bucket) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Iterate over a bucket's owned gradients by parameter; the first tensor rank counts replicated parameters."""
        for param, part in self._counted[bucket]:
            yield param, bucket.owned_part(bucket.grads.owned, part)

    def bytes_to_place(self, bucket: Bucket) -> int:
        """Return the memory that `place` would allocate on the accelerator, without the cast buffer."""
        states = [value for piece in self._pieces[bucket] for value in self.inner.state.get(piece.param, {}).values()]
        moments = sum(max(value.nbytes, LEAST_ALLOCATION) for value in states if isinstance(value, Tensor))
        # An optimizer that has skipped every step so far has not made its moments yet.
        moments = max(moments, round(bucket.master.nbytes * self.state_bytes_per_element / 4))
        needs_own_master = bucket.master.dtype != bucket.grads.dtype or bucket.params.placement is Placement.HOST
        return moments + bucket.master.nbytes * needs_own_master + bucket.grads.bytes_on_accelerator

    def place(self, bucket: Bucket, placement: Placement) -> None:
        """Move a bucket's master weights, moments and owned gradient, between steps. The gradient's values are lost."""
        bucket.place_master(placement)
        for piece in self._pieces[bucket]:
            piece.param.data = bucket.master[piece.elements.start : piece.elements.stop]
            state = self.inner.state.get(piece.param, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    to = self._offload.new(placement, TensorKind.MOMENTS, value.numel(), value.dtype)
                    state[name] = to.copy_(value)
                elif isinstance(value, Tensor) and self.inner.defaults.get("fused"):  # torch's step counters
                    state[name] = value.to(bucket.master.device)
        bucket.grads.place(placement)
        self._make_cast_buffers()

    def _grad_norm(self) -> Tensor:
        """Return the global norm, bucket by bucket (C_B): each element has one owner along the shard axis.

        Buckets are added in one order, wherever they are placed: a run that is resumed places them anew.
        """
        dtype = reduce(torch.promote_types, {bucket.master.dtype for bucket in self.buckets}, torch.float32)
        squares = self.loss_scale.scale.new_zeros((), dtype=dtype)
        for bucket in self.buckets:
            # The first tensor rank counts all of it, padding included, which is zero.
            is_whole = self._tensor.rank == 0
            grads = [bucket.grads.owned] if is_whole else [grad for _, grad in self.counted_gradients(bucket)]
            if chunks := [chunk for grad in grads for chunk in grad.split(NORM_CHUNK_NUMEL)]:
                with allocating(TensorKind.OTHER, on_host=bucket.optimizer_placement is Placement.HOST):
                    square = torch.stack(list(foreach_norm(chunks, 2, dtype))).square().sum()
                squares.add_(square.to(squares.device))
        for axis in self._norm_axes:
            axis.all_reduce(squares, out=squares).wait()
        return squares.sqrt() / self.loss_scale.scale

    def _update_all(self, coefficient: Tensor, found_inf: Tensor) -> None:
        # First: a full buffer that is freed while a side stream copies into it would return to the wrong pool.
        for flat in self._flats:
            flat.reshard()
        self._bucketed.begin_round()
        published = []
        for placement in Placement:
            device = self._offload.device_of(placement)
            if buckets := self._buckets_on(placement):
                here = coefficient.to(device)
                if self._takes_found_inf:
                    self.inner.found_inf = found_inf.to(device)  # type: ignore[attr-defined]
                for bucket in buckets:
                    self._update(bucket, here)
                    published.append(self._publish(bucket))
        self._bucketed.end_round()
        for handle in published:
            handle.wait()

    def _update(self, bucket: Bucket, coefficient: Tensor) -> None:
        """Step the torch optimizer for one bucket, whose gradient is cast to the master weights' dtype first."""
        grad = bucket.grads.owned
        if grad.dtype != bucket.master.dtype:
            grad = self.cast_buffers[bucket.optimizer_placement][: grad.numel()].copy_(grad)
        on_host = bucket.optimizer_placement is Placement.HOST
        with allocating(TensorKind.MOMENTS, on_host=on_host):  # a torch optimizer makes them in its first step
            self._bucketed.step(self._pieces[bucket], grad.mul_(coefficient))

    def _publish(self, bucket: Bucket) -> Handle:
        """Copy master weights to the owned parameters, wherever either is placed, and all-gather what was updated."""
        params, master = bucket.params, bucket.master
        if bucket.optimizer_placement is params.placement:
            params.owned.copy_(master)  # returns early if both are the same memory
            return params.all_gather_updated()
        if bucket.optimizer_placement is Placement.HOST:
            return self._offload.to_accelerator(master, params.owned, params.all_gather_updated)
        copied = self._offload.to_host(master.to(params.owned.dtype), params.owned)
        return Handle(params.all_gather_updated().wait, copied.wait)

    @property
    def _takes_found_inf(self) -> bool:
        # Fused SGD accepts it too, but a skipped first step leaves it with a momentum buffer that is not initialized.
        return isinstance(self.inner, (torch.optim.Adam, torch.optim.AdamW)) and bool(self.inner.defaults["fused"])

    def _must_skip(self, found_inf: Tensor) -> bool:
        """Read the flag, hence wait for the device, only if the optimizer cannot take it as a tensor."""
        return not self._takes_found_inf and bool(found_inf)

    def _buckets_on(self, placement: Placement) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.optimizer_placement is placement]

    def _make_cast_buffers(self) -> None:
        """Allocate one buffer in each memory, for the gradient of a bucket in the master weights' dtype."""
        self.cast_buffers: dict[Placement, Tensor] = {}
        for placement in Placement:
            buckets = self._buckets_on(placement)
            if cast := [bucket.master for bucket in buckets if bucket.grads.dtype != bucket.master.dtype]:
                largest = max(cast, key=Tensor.numel)
                new = self._offload.new(placement, TensorKind.BUFFERS, largest.numel(), largest.dtype)
                self.cast_buffers[placement] = new


def _pieces(bucket: Bucket, owned: list[tuple[nn.Parameter, range]], group_of: dict[nn.Parameter, int]) -> list[Piece]:
    """Make the optimizer's parameters of one bucket: views of its master weights, which are allocated here."""
    bucket.place_master(bucket.optimizer_placement)
    return [
        Piece(
            nn.Parameter(bucket.owned_part(bucket.master, part)),
            range(part.start - bucket.shard.start, part.stop - bucket.shard.start),
            group_of[param],
        )
        for param, part in owned
        if param in group_of
    ]


def _number_groups(groups: list[dict[str, Any]], known: set[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Return the group number of every parameter.

    Raises ValueError if a parameter is in two groups, or not in the model.
    """
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
