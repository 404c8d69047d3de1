"""A torch optimizer that updates some of its parameters at a time, and a check that this gives the same results.

Shards ignore parameter boundaries, so the update of an element must not depend on other elements. This is true of Adam
and SGD. LAMB, Muon and Adafactor compute with whole parameters: on shards they would silently train differently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.errors import ConfigError
from parallel.instruments.fake_tensors import real_tensors

MIN_ALLOCATION_BYTES = 512  # that CUDA's allocator takes for any smaller tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements of one parameter that are in one shard, flattened: the torch optimizer's own parameter."""

    param: nn.Parameter
    """The optimizer's parameter, a view of the bucket's master weights."""
    elements: range
    """The elements of the piece, counted from the beginning of the bucket's shard."""
    group: int
    """The number of the parameter group."""


class BucketedOptimizer:
    """A torch optimizer that is stepped for the pieces of one bucket at a time.

    A round consists of one step for each bucket. Counters that the optimizer keeps for each parameter group, such as
    the step counter of apex's Adam, advance once in a round, because each bucket's step starts from the same counters.
    """

    def __init__(self, inner: Optimizer):
        self.inner = inner
        self._all_params = [group["params"] for group in inner.param_groups]

    def begin_round(self) -> None:
        """Begin a round, and read the settings of the groups, such as the learning rate."""
        self._before = [_settings(group) for group in self.inner.param_groups]
        self._after = list(self._before)

    def step(self, pieces: Sequence[Piece], grad: Tensor) -> None:
        """Step the optimizer for the pieces of one bucket; `grad` is the flat gradient of the bucket's shard."""
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
        """End a round: the groups have all pieces, and the counters that the round has advanced."""
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._after[number], self._all_params[number])

    def state_bytes(self, pieces: Sequence[Piece]) -> int:
        """Return the bytes that the optimizer's states of some pieces take on an accelerator."""
        states = [value for piece in pieces for value in self.inner.state.get(piece.param, {}).values()]
        return sum(max(value.nbytes, MIN_ALLOCATION_BYTES) for value in states if isinstance(value, Tensor))

    def move(self, pieces: Sequence[Piece], values: Tensor, new: Callable[[int, torch.dtype], Tensor]) -> None:
        """Make the pieces of a bucket views of `values`, and copy their states to memory from `new(numel, dtype)`."""
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
    """Replace the content of a parameter group, in place since schedulers refer to it.

    Counters that are not in `settings`, because an optimizer made them since these were read, are removed.
    """
    group.clear()
    group.update(settings, params=params)


def number_groups(groups: list[dict[str, Any]], known: set[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Return the number of the group of each parameter.

    Raises ValueError if a parameter is in two groups, or not one of `known`, the parameters of the model.
    """
    group_of: dict[nn.Parameter, int] = {}
    for number, group in enumerate(groups):
        for param in group["params"]:
            if param not in known:
                raise ValueError(
                    f"parameter group {number} has a tensor of shape {tuple(param.shape)} not of this model; give "
                    "parameters of the module inside ZeroDataParallel"
                )
            if param in group_of:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is in groups {group_of[param]} and {number}; leave it "
                    "in one of them"
                )
            group_of[param] = number
    return group_of


@real_tensors()
def probe_elementwise(optimizer: type[Optimizer], settings: dict[str, Any], device: torch.device) -> float:
    """Check that an optimizer gives the same result for a small parameter as a whole and for two flat pieces of it.

    Return the bytes of the optimizer's state for each element of a parameter in fp32. Raises ConfigError if the results
    differ, or if the optimizer refuses flat pieces.
    """
    if "lr" in settings:
        settings = settings | {"lr": 1e-2}  # with a rate near zero, no two results would differ
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
        raise ConfigError(
            f"optimizer {optimizer.__name__} cannot step flat pieces of parameters: {error}; choose an optimizer such "
            "as AdamW, Adam or SGD"
        ) from error
    if not is_elementwise:
        raise ConfigError(
            f"optimizer {optimizer.__name__} is not element-wise: it updates a 6 x 8 parameter differently as a whole "
            "and in 2 pieces, so its states cannot be partitioned; choose an optimizer such as AdamW, Adam or SGD"
        )
    states = [value for value in inner.state[whole].values() if isinstance(value, Tensor)]
    return float(sum(state.element_size() for state in states if state.numel() == whole.numel()))
