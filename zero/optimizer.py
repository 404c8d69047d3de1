"""Any element-wise torch optimizer, run on the pieces of parameters that this rank owns.

Per step: norm of all gradients -> clip coefficient (a tensor) -> per window: cast, update, write back, publish.
Nothing here reads a tensor's value, so nothing waits for the device; the one exception is named (`_must_skip`).
"""

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from parallel.layers import split_dims
from parallel.ledger import Kind, allocating, tagged
from parallel.mesh import Axis, Handle
from zero.elementwise import Piece, WindowedOptimizer, probe_elementwise
from zero.engine import ZeroDataParallel
from zero.flat import FlatParameters
from zero.gradients import WindowGradient
from zero.loss_scale import LossScale

# A CPU adds fp32 squares one after the other: the norm of 17M elements in one piece is wrong by 2e-4.
NORM_CHUNK_NUMEL = 2**18


@dataclass(frozen=True, eq=False)
class OwnedWindow:
    """This rank's shard of one window, as the optimizer sees it."""

    flat: FlatParameters
    index: int
    gradient: WindowGradient
    pieces: list[Piece]  # views of `master`

    @property
    def master(self) -> Tensor:
        """At least fp32; the owned parameters themselves where they are that already."""
        return self.flat.masters[self.index]

    def write_back(self) -> Handle:
        self.flat.owned[self.index].copy_(self.master)  # returns early where both are the same memory
        return self.flat.publish(self.index)

    @property
    def has_own_master(self) -> bool:
        return self.master.data_ptr() != self.flat.owned[self.index].data_ptr()


class ZeroOptimizer:
    """`groups` are torch's parameter groups, written with the model's own parameters.

    `tensor` is the axis along which the model itself is cut: the norm, and whether a step is skipped, hold for all of
    it, and parameters that `parallel.layers.split_dims` does not name, which every rank has, count once.

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
        device = next(model.module.parameters()).device
        self.loss_scale = loss_scale or LossScale(device=device)
        self.num_skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.state_bytes_per_element = probe_elementwise(optimizer, settings, device)
        self._tensor = tensor or Axis.trivial("tensor")
        groups = groups or [{"params": list(model.module.parameters())}]
        group_of = _number_groups(groups, set(model.module.parameters()))
        self.windows = [
            _own_window(flat, index, gradient, group_of)
            for flat, gradients in model.reducer.windows.items()
            for index, gradient in enumerate(gradients)
        ]
        self._counted = [
            [chunk for grad in grads for chunk in grad.split(NORM_CHUNK_NUMEL)]
            for grads in self._gradients_that_count()
            if grads
        ]
        pieces = [piece for window in self.windows for piece in window.pieces]
        groups = [group | {"params": [p.param for p in pieces if p.group == n]} for n, group in enumerate(groups)]
        self._windowed = WindowedOptimizer(optimizer(groups, **settings))
        self.cast_buffer = self._make_cast_buffer()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer, whose parameters are the owned pieces; set learning rates in its `param_groups`."""
        return self._windowed.inner

    @torch.no_grad()
    def step(self, *, skip: Tensor | None = None) -> Tensor:
        """Update the parameters; returns the global norm of the gradients before clipping, without the loss scale.

        `skip`: 0-dim, the same on all ranks; where it is not zero nothing is updated, as after an overflow.
        """
        self._model.reducer.finish_missing()
        norm = self._grad_norm()
        coefficient = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0) / self.loss_scale.scale
        found_inf = (~norm.isfinite()).float()
        skipped = found_inf if skip is None else torch.maximum(found_inf, skip.float())
        if not self._must_skip(skipped):
            self._update_all(coefficient, skipped)
        self.num_skipped.add_(skipped.long())
        self.loss_scale.update(found_inf)
        self._model.reducer.clear()
        return norm

    @property
    def norm_bytes(self) -> int:
        """Of the norms of one window's chunks."""
        return 2 * 4 * max(map(len, self._counted), default=0)

    def zero_grad(self) -> None:
        """Drop the gradients, as after a failed backward; `step` does so by itself."""
        self._model.reducer.clear()

    def _grad_norm(self) -> Tensor:
        """Every element has one owner along the shard axis, and padding is zero. A window at a time (C_B)."""
        dtype = reduce(torch.promote_types, (window.master.dtype for window in self.windows), torch.float32)
        squares = self.loss_scale.scale.new_zeros((), dtype=dtype)
        for chunks in self._counted:
            squares.add_(torch.stack(list(torch._foreach_norm(chunks, 2, dtype))).square().sum())
        for axis in (self._model.shard_axis, self._tensor):
            axis.all_reduce(squares, out=squares).wait()
        return squares.sqrt() / self.loss_scale.scale

    def _gradients_that_count(self) -> list[list[Tensor]]:
        """Each window's owned gradients, without those of replicated parameters on all tensor ranks but the first."""
        if self._tensor.rank == 0:
            return [[window.gradient.owned] for window in self.windows]
        module = self._model.module
        split = {module.get_parameter(name) for name in split_dims(module)}
        return [
            [
                window.gradient.owned[elements.start : elements.stop]
                for param, elements in window.flat.owned_pieces(window.index)
                if param in split
            ]
            for window in self.windows
        ]

    def _update_all(self, coefficient: Tensor, found_inf: Tensor) -> None:
        if self._takes_found_inf:
            self.inner.found_inf = found_inf  # type: ignore[attr-defined]
        self._windowed.begin_round()
        published = [self._update(window, coefficient) for window in self.windows]
        self._windowed.end_round()
        for handle in published:
            handle.wait()

    def _update(self, window: OwnedWindow, coefficient: Tensor) -> Handle:
        grad = window.gradient.owned
        if grad.dtype != window.master.dtype:
            grad = self.cast_buffer[: grad.numel()].copy_(grad)
        with allocating(Kind.MOMENTS):  # a torch optimizer makes them in its first step
            self._windowed.step(window.pieces, grad.mul_(coefficient))
        return window.write_back()

    @property
    def _takes_found_inf(self) -> bool:
        # Fused SGD says so too, but a skipped first step leaves it with a momentum buffer of whatever was in memory.
        return isinstance(self.inner, (torch.optim.Adam, torch.optim.AdamW)) and bool(self.inner.defaults["fused"])

    def _must_skip(self, found_inf: Tensor) -> bool:
        """Reads the flag, hence waits for the device, only where the optimizer cannot take it as a tensor."""
        return not self._takes_found_inf and bool(found_inf)

    def _make_cast_buffer(self) -> Tensor:
        """Gradients stay in the parameters' type; one window at a time is cast to the master's."""
        cast = [w.master for w in self.windows if w.gradient.owned.dtype != w.master.dtype]
        largest = max(cast, key=Tensor.numel, default=torch.empty(0))
        return tagged(Kind.BUFFERS, torch.empty_like(largest))


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


def _own_window(
    flat: FlatParameters, index: int, gradient: WindowGradient, group_of: dict[nn.Parameter, int]
) -> OwnedWindow:
    """Parameters in no group keep their values, as in torch."""
    owned = flat.owned[index]
    dtype = torch.promote_types(owned.dtype, torch.float32)
    master = owned if owned.dtype is dtype else tagged(Kind.MASTER, owned.to(dtype))
    flat.masters[index] = master
    pieces = [
        Piece(nn.Parameter(master[elements.start : elements.stop]), elements, group_of[param])
        for param, elements in flat.owned_pieces(index)
        if param in group_of
    ]
    return OwnedWindow(flat, index, gradient, pieces)
