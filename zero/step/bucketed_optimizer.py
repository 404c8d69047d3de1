"""A torch optimizer that updates some of its parameters at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.step.pieces import Piece

MIN_ALLOCATION_BYTES = 512  # that CUDA's allocator takes for any smaller tensor


class BucketedOptimizer:
    """A torch optimizer that is stepped for the pieces of one or a few buckets at a time.

    A round consists of steps for all buckets. Counters that the optimizer keeps for each parameter group, such as
    the step counter of apex's Adam, advance once in a round, because each step starts from the same counters.
    """

    def __init__(self, inner: Optimizer, bytes_per_element: Sequence[float] = ()):
        """`bytes_per_element`: of the states of each parameter group, in fp32."""
        self.inner, self.bytes_per_element = inner, bytes_per_element
        self._all_params = [group["params"] for group in inner.param_groups]

    @property
    def skips_by_itself(self) -> bool:
        """True if the optimizer takes a flag, on the device, by which it skips a step."""
        # Fused SGD accepts it too, but a skipped first step leaves it with a momentum buffer that is not initialized.
        return isinstance(self.inner, (torch.optim.Adam, torch.optim.AdamW)) and bool(self.inner.defaults["fused"])

    def set_flag(self, skip: Tensor) -> None:
        """Let the optimizer skip its next updates if `skip` is not zero, if it takes such a flag."""
        if self.skips_by_itself:
            self.inner.found_inf = skip  # type: ignore[attr-defined]

    def begin_round(self) -> None:
        """Begin a round, and read the settings of the groups, such as the learning rate."""
        self._before = [settings_of(group) for group in self.inner.param_groups]
        self._after = list(self._before)

    def step(self, shards: Sequence[tuple[Sequence[Piece], Tensor]]) -> None:
        """Step the optimizer for the pieces of some buckets, each with the flat gradient of the bucket's shard."""
        stepped = [piece for pieces, _ in shards for piece in pieces]
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._before[number], [piece.param for piece in stepped if piece.group == number])
        for pieces, grad in shards:
            for piece in pieces:
                piece.param.grad = grad[piece.elements.start : piece.elements.stop]
        self.inner.step()
        for number in {piece.group for piece in stepped}:
            self._after[number] = settings_of(self.inner.param_groups[number])
        for piece in stepped:
            piece.param.grad = None

    def skip_round(self) -> None:
        """Step without parameters: a schedule of learning rates warns if the optimizer has not stepped before it."""
        self.begin_round()
        self.step([])
        self.end_round()

    def end_round(self) -> None:
        """End a round: the groups have all pieces, and the counters that the round has advanced."""
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._after[number], self._all_params[number])

    def state_bytes(self, pieces: Sequence[Piece]) -> int:
        """Return the bytes that the optimizer's states of some pieces take, or will take, on an accelerator."""
        # An optimizer that has skipped every step so far has not made its moments yet.
        expected = round(sum(self.bytes_per_element[piece.group] / 4 * piece.param.nbytes for piece in pieces))
        states = [value for piece in pieces for value in self.inner.state.get(piece.param, {}).values()]
        made = sum(max(value.nbytes, MIN_ALLOCATION_BYTES) for value in states if isinstance(value, Tensor))
        return max(made, expected)

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


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _replace(group: dict[str, Any], settings: dict[str, Any], params: list[nn.Parameter]) -> None:
    """Replace the content of a parameter group, in place since schedulers refer to it.

    Counters that are not in `settings`, because an optimizer made them since these were read, are removed.
    """
    group.clear()
    group.update(settings, params=params)
