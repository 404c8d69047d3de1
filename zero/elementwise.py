"""A torch optimizer that steps a part of its parameters at a time, and a probe that it may.

Shards ignore parameter boundaries, so an optimizer must treat every element by itself. Adam and SGD do; LAMB, Muon
and Adafactor look at whole parameters and would silently train something else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.errors import ConfigError
from parallel.instruments.fake_tensors import real_tensors

LEAST_ALLOCATION = 512  # bytes that CUDA's allocator gives to any smaller tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """A stretch of one parameter, flat, which is a parameter to the optimizer."""

    param: nn.Parameter
    elements: range
    """Its elements, counted from the beginning of the bucket's shard."""
    group: int
    """The number of its parameter group."""


class BucketedOptimizer:
    """A torch optimizer that is stepped for the pieces of one bucket at a time.

    A round is one step for all buckets: counters that the optimizer keeps for each group advance once in it.
    """

    def __init__(self, inner: Optimizer):
        self.inner = inner
        self._all_params = [group["params"] for group in inner.param_groups]

    def begin_round(self) -> None:
        """Begin a step of all buckets. The groups' settings, such as the learning rate, are read here."""
        self._before = [_settings(group) for group in self.inner.param_groups]
        self._after = list(self._before)

    def step(self, pieces: Sequence[Piece], grad: Tensor) -> None:
        """Step for some pieces; `grad` is the flat gradient of the bucket's shard. No piece keeps its gradient."""
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._before[number], [piece.param for piece in pieces if piece.group == number])
        for piece in pieces:
            piece.param.grad = grad[piece.elements.start : piece.elements.stop]
        self.inner.step()
        for number in {piece.group for piece in pieces}:
            self._after[number] = _settings(self.inner.param_groups[number])
        for piece in pieces:
            piece.param.grad = None

    def end_round(self) -> None:
        """End a step of all buckets: the groups hold all pieces again."""
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._after[number], self._all_params[number])

    def state_bytes(self, pieces: Sequence[Piece]) -> int:
        """Return the memory that the states of some pieces take on an accelerator."""
        states = [value for piece in pieces for value in self.inner.state.get(piece.param, {}).values()]
        return sum(max(value.nbytes, LEAST_ALLOCATION) for value in states if isinstance(value, Tensor))

    def move(self, pieces: Sequence[Piece], values: Tensor, new: Callable[[int, torch.dtype], Tensor]) -> None:
        """Make the pieces of a bucket views of `values`, and move their states to memory from `new(numel, dtype)`."""
        for piece in pieces:
            piece.param.data = values[piece.elements.start : piece.elements.stop]
            state = self.inner.state.get(piece.param, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[name] = new(value.numel(), value.dtype).copy_(value)
                elif isinstance(value, Tensor) and self.inner.defaults.get("fused"):  # torch's step counters
                    state[name] = value.to(values.device)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _replace(group: dict[str, Any], settings: dict[str, Any], params: list[nn.Parameter]) -> None:
    """Replace what is in a group, in place since others may hold it; counters made in between are removed."""
    group.clear()
    group.update(settings, params=params)


def number_groups(groups: list[dict[str, Any]], known: set[nn.Parameter]) -> dict[nn.Parameter, int]:
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


@real_tensors()
def probe_elementwise(optimizer: type[Optimizer], settings: dict[str, Any], device: torch.device) -> float:
    """Step a small parameter as a whole and in flat pieces; return the optimizer's state in bytes an element (fp32).

    Raises ConfigError if the two differ, or if the optimizer refuses flat pieces.
    """
    if "lr" in settings:
        settings = settings | {"lr": 1e-2}  # a step that changes almost nothing proves nothing
    generator = torch.Generator().manual_seed(0)
    values, *grads = torch.randn(4, 6, 8, generator=generator).to(device)
    whole = nn.Parameter(values.clone())
    flat, cut = values.flatten(), 19
    pieces = [
        Piece(nn.Parameter(flat[:cut].clone()), range(cut), 0),
        Piece(nn.Parameter(flat[cut:].clone()), range(flat.numel() - cut), 0),
    ]
    try:
        inner = optimizer([whole], **settings)
        bucketed = BucketedOptimizer(optimizer([piece.param for piece in pieces], **settings))
        for grad in grads:
            whole.grad = grad.clone()
            inner.step()
            bucketed.begin_round()
            bucketed.step(pieces[:1], grad.flatten()[:cut].clone())
            bucketed.step(pieces[1:], grad.flatten()[cut:].clone())
            bucketed.end_round()
        joined = torch.cat([piece.param.detach() for piece in pieces])
        is_elementwise = torch.allclose(whole.detach().flatten(), joined, rtol=1e-5, atol=1e-7)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {optimizer.__name__} cannot step flat pieces of parameters: {error}") from error
    if not is_elementwise:
        raise ConfigError(
            f"optimizer {optimizer.__name__} is not element-wise: stepping a 6 x 8 parameter whole and in 2 pieces "
            "differs, so it cannot be partitioned; choose one like AdamW, Adam or SGD"
        )
    per_element = [
        s for s in inner.state[whole].values() if isinstance(s, Tensor) and s.numel() == math.prod(whole.shape)
    ]
    return float(sum(s.element_size() for s in per_element))
