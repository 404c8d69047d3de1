"""A torch optimizer that steps a part of its parameters at a time, and the proof that it may.

Shards ignore parameter boundaries, so an optimizer must treat every element by itself. Adam and SGD do; LAMB, Muon
and Adafactor look at whole parameters and would silently train something else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.errors import ConfigError
from parallel.instruments.fake_tensors import real_tensors


@dataclass(frozen=True, eq=False)
class Piece:
    """A stretch of one parameter, flat, as the optimizer sees it; `group` is the number of its parameter group."""

    param: nn.Parameter
    elements: range  # in the bucket's shard
    group: int


class BucketedOptimizer:
    """Steps `inner` for the pieces of one bucket; what it counts per group, it counts once a round."""

    def __init__(self, inner: Optimizer):
        self.inner = inner
        self._all_params = [group["params"] for group in inner.param_groups]

    def begin_round(self) -> None:
        """Before the first bucket of a step. The groups' settings (learning rate, ...) are read here."""
        self._before = [_settings(group) for group in self.inner.param_groups]
        self._after = list(self._before)

    def step(self, pieces: Sequence[Piece], grad: Tensor) -> None:
        """`grad`: flat, the gradient of the bucket's shard. Leaves every piece without a gradient."""
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
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._after[number], self._all_params[number])


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _replace(group: dict[str, Any], settings: dict[str, Any], params: list[nn.Parameter]) -> None:
    """In place: a counter that the optimizer has made since goes, and others may hold the group."""
    group.clear()
    group.update(settings, params=params)


@real_tensors()
def probe_elementwise(optimizer: type[Optimizer], settings: dict[str, Any], device: torch.device) -> float:
    """Try the optimizer whole and in flat pieces on a small parameter; returns its state in bytes an element (fp32).

    Raises ConfigError where the two differ, or where the optimizer refuses flat pieces.
    """
    if "lr" in settings:
        settings = settings | {"lr": 1e-2}  # steps that hardly change anything would prove nothing
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
