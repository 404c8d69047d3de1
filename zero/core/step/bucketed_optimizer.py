"""A torch optimizer that updates some of its parameters at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.torch_internals import step_hooks_run_once
from zero.core.step.atoms import atom_of
from zero.core.step.pieces import Groups, Piece

# Settings that say how, not what, is computed.
IMPLEMENTATION = {"fused", "foreach", "capturable", "differentiable", "iterates_on"}
MIN_ALLOCATION_BYTES = 512  # that CUDA's allocator takes for any smaller tensor


class BucketedOptimizer:
    """A torch optimizer that is stepped for the pieces of one or a few buckets at a time.

    A round consists of steps for all buckets. Counters that the optimizer keeps for each parameter group, such as
    the step counter of apex's Adam, advance once in a round, because each step starts from the same counters. They are
    the same on all ranks, also on one that owns nothing of a group.
    """

    def __init__(self, inner: Optimizer, bytes_per_element: Sequence[float] = (), shown: Groups | None = None):
        """`bytes_per_element`: of the states of each parameter group, in fp32.

        `shown`: groups whose parameters those of `inner` have between steps, in place of the pieces.
        """
        self.inner, self.bytes_per_element = inner, bytes_per_element
        self._pieces = [group["params"] for group in inner.param_groups]
        self._shown = self._pieces if shown is None else [group["params"] for group in shown]
        self._counting = {n for n, group in enumerate(inner.param_groups) if not atom_of(inner, group).is_assembled}
        self._set_params(self._shown)
        self._open_steps: list[None] = []  # the hook has no reference to this object: it would keep the states alive
        inner.register_step_pre_hook(partial(_check_is_open, self._open_steps))

    @property
    def is_stepping(self) -> bool:
        """True inside `stepping`."""
        return bool(self._open_steps)

    @property
    def skips_by_itself(self) -> bool:
        """True if the optimizer takes a flag, on the device, by which it skips a step."""
        if isinstance(self.inner, torch.optim.SGD) and any(group["dampening"] for group in self.inner.param_groups):
            return False  # its first step is not that from a momentum of zeros
        with_flag = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
        return isinstance(self.inner, with_flag) and bool(self.inner.defaults["fused"])

    def set_flag(self, skip: Tensor) -> None:
        """Let the optimizer skip its next updates if `skip` is not zero, if it takes such a flag."""
        if self.skips_by_itself:
            self.inner.found_inf = skip  # type: ignore[attr-defined]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let rounds be run inside this context, around which the step hooks of the optimizer run once."""
        self._open_steps.append(None)
        try:
            with step_hooks_run_once(self.inner):
                yield
        finally:
            self._open_steps.clear()

    def begin_round(self) -> None:
        """Begin a round, and read the settings of the groups, such as the learning rate."""
        self._before = [settings_of(group) for group in self.inner.param_groups]
        self._after, self._idle = list(self._before), set(self._counting)

    def step(self, shards: Sequence[tuple[Sequence[Piece], Tensor]]) -> None:
        """Step the optimizer for the pieces of some buckets, each with the flat gradient of the bucket's shard."""
        stepped = [piece for pieces, _ in shards for piece in pieces]
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._before[number], [piece.param for piece in stepped if piece.group == number])
        for pieces, grad in shards:
            for piece in pieces:
                piece.param.grad = grad[piece.elements.start : piece.elements.stop]
        if self.skips_by_itself and isinstance(self.inner, torch.optim.SGD):
            self._make_momentum(stepped)
        self.inner.step()
        self._keep_counters({piece.group for piece in stepped})
        for piece in stepped:
            piece.param.grad = None

    def _keep_counters(self, stepped: set[int]) -> None:
        for number in stepped:
            self._after[number] = settings_of(self.inner.param_groups[number])
        self._idle -= stepped

    def _count_idle(self) -> None:
        """Advance the counters of the groups of which this rank has stepped nothing, as other ranks have."""
        stand_in = nn.Parameter(torch.empty(0))  # without a gradient, as a parameter that was not used
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._before[number], [stand_in] if number in self._idle else [])
        with suppress(AttributeError, TypeError):  # of an optimizer that takes every parameter to have a gradient
            self.inner.step()
            self._keep_counters(set(self._idle))

    def _make_momentum(self, pieces: Sequence[Piece]) -> None:
        """Begin with a momentum of zeros: fused SGD does not initialize it in a first step that is skipped."""
        for piece in pieces:
            state = self.inner.state[piece.param]
            if self._before[piece.group]["momentum"] and "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(piece.param)

    def skip_round(self) -> None:
        """Step without parameters: a schedule of learning rates warns if the optimizer has not stepped before it."""
        self.begin_round()
        self._idle.clear()
        self.step([])
        self.end_round()

    def end_round(self) -> None:
        """End a round: the groups have all parameters, and the counters that the round has advanced."""
        if self._idle:
            self._count_idle()
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._after[number], self._shown[number])

    @contextmanager
    def with_pieces(self) -> Iterator[None]:
        """Let the groups have all pieces inside this context, for a method that is not `step`."""
        self._set_params(self._pieces)
        try:
            yield
        finally:
            self._set_params(self._shown)

    def _set_params(self, params: Sequence[list[nn.Parameter]]) -> None:
        for group, of_group in zip(self.inner.param_groups, params, strict=True):
            group["params"] = of_group

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


def _check_is_open(open_steps: Sequence[None], inner: Optimizer, *_: object) -> None:
    if not open_steps:
        raise RuntimeError(
            f"{type(inner).__name__} inside a ZeroOptimizer has no gradients of its own, and its step would update "
            "nothing; call `step` of the ZeroOptimizer"
        )


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def load_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Give a parameter group the settings of another run; how it computes them stays."""
    for name, value in settings.items():
        present = group.get(name)
        if isinstance(present, Tensor):  # a captured step reads this tensor
            present.fill_(value)
        elif name not in IMPLEMENTATION:
            value = tuple(value) if isinstance(value, list) else value
            group[name] = bool(value) if isinstance(present, bool) else value


def _replace(group: dict[str, Any], settings: dict[str, Any], params: list[nn.Parameter]) -> None:
    """Replace the content of a parameter group, in place since schedulers refer to it.

    Counters that are not in `settings`, because an optimizer made them since these were read, are removed.
    """
    group.clear()
    group.update(settings, params=params)
