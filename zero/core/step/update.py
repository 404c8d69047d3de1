"""The protocol of an update: what one torch optimizer does with the owned pieces of its parameters in a step.

| granularity | an update needs | so |
| --- | --- | --- |
| an element | the element alone: Adam, SGD | shards may begin anywhere |
| a block | consecutive elements of a parameter: 8-bit Adam | shards begin at blocks (`ZeroConfig.alignment`) |
| a matrix | a whole matrix: Muon | the parts of a matrix are sent to one rank, and its result is sent back |
| a row | a whole row | it is sent with its matrix, of which its own `transform` computes each row by itself |

A class of optimizers whose granularity is a block declares its `granularity`, a number of elements. One that needs more
than its rank owns declares an `update_class`: `MatrixOptimizer` has that of matrices and rows. Any other class is
updated by `ElementWise`. The declaration is tested before the optimizer is used (`zero/core/step/probe.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.mesh import Axis
from parallel.torch_internals import step_hooks_run_once
from parallel.validation.errors import ConfigError
from zero.core.buckets.bucket import Bucket
from zero.core.protocols.home import Homes
from zero.core.step.parameter_groups import Groups
from zero.core.step.pieces import OwnedPieces, Piece

MIN_ALLOCATION_BYTES = 512  # that CUDA's allocator takes for any smaller tensor
Axes = tuple[Axis, Axis, Axis]  # of shards, of replicas and of tensor ranks
Shards = Sequence[tuple[Bucket, Tensor]]  # buckets, each with the flat gradient of what this rank owns of it


@dataclass(frozen=True)
class UpdateContext:
    """The parts of the engine, and of the optimizer that it belongs to, that an update may read."""

    groups: Groups
    """All groups of the optimizer, with the parameters of the model."""
    bytes_per_element: Sequence[float]
    """The bytes of the states of each group for an element in fp32, without those of whole matrices."""
    module: nn.Module
    pieces: OwnedPieces
    """Those of all updates of the optimizer."""
    find_axes: Callable[[], Axes]
    """Raises ConfigError if parameters are divided over different ranks."""
    homes: Homes
    is_rank_invariant: bool
    """True if the bits must not depend on the number of ranks."""


@dataclass
class Step:
    """The state of an update: whether its optimizer may step."""

    is_open: bool = False


class Update:
    """The update of some parameter groups by one torch optimizer, in parts that follow each other in a step.

    begin       the settings of the groups are read
    update      of buckets, one or a few at a time: pieces are updated, or what is sent of `assembled` ones is prepared
    send        messages are launched; meanwhile the buckets without assembled pieces are updated and published
    compute     what this rank has received is computed, and returned
    returned    after each of its values, `apply` updates the assembled pieces of all buckets
    end         memory of this step is freed

    All ranks call all parts, in this order: `begin` of all updates, then `update` of all of them, and so on.
    """

    assembled: Set[Bucket] = frozenset()
    """The buckets in which any rank owns a piece of what is put together: the same on all ranks."""

    def __init__(self, optimizer: Optimizer, numbers: Sequence[int], context: UpdateContext | None = None):
        """`numbers`: those of the groups of `optimizer` among all groups; it has pieces in place of parameters.

        Between steps its groups have the parameters of the model. Without a context, they have pieces.
        """
        self.optimizer, self._context = optimizer, context
        self.groups: dict[int, dict[str, Any]] = dict(zip(numbers, optimizer.param_groups, strict=True))
        self._pieces = {number: group["params"] for number, group in self.groups.items()}
        shown = context.groups if context else {number: group.copy() for number, group in self.groups.items()}
        self._shown = {number: shown[number]["params"] for number in self.groups}
        self._set_params(self._shown)
        found = context.pieces.by_bucket.items() if context else ()
        own = ((bucket, self.pieces_in(pieces)) for bucket, pieces in found)
        self._by_bucket = {bucket: pieces for bucket, pieces in own if pieces}
        self._step = Step()

    @classmethod
    def check_states(cls, optimizer: Optimizer) -> None:
        """Raise ConfigError if states of an optimizer of whole parameters cannot be cut into those of pieces."""
        for param, state in optimizer.state.items():
            for kind, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                    raise ConfigError(
                        f"{kind} of {type(optimizer).__name__} is not one value for each element; give the optimizer "
                        "to ZeroOptimizer before its first step"
                    )

    def refuse_other_steps(self) -> None:
        """Let the optimizer raise RuntimeError if it is stepped by anything else, from now on."""
        # The hook has no reference to this object: it would keep the states alive.
        self.optimizer.register_step_pre_hook(partial(_check_is_open, self._step))

    @property
    def is_stepping(self) -> bool:
        """True inside `stepping`."""
        return self._step.is_open

    @property
    def skips_by_itself(self) -> bool:
        """True if the optimizer takes a flag, on the device, by which it skips a step."""
        optimizer: Any = self.optimizer
        if isinstance(optimizer, torch.optim.SGD) and any(group["dampening"] for group in self.groups.values()):
            return False  # its first step is not that from a momentum of zeros
        with_flag = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
        has_flag = isinstance(optimizer, with_flag) and bool(optimizer.defaults["fused"])
        return has_flag or getattr(optimizer, "skips_by_flag", False)

    @property
    def counts_on_device(self) -> bool:
        """True if counters of steps are beside the parameters, and not on the host."""
        return self.skips_by_itself or bool(self.optimizer.defaults.get("fused"))

    def set_flag(self, skip: Tensor) -> None:
        """Set the flag of the optimizer, `found_inf`, if it takes one: its next updates are skipped unless it is 0."""
        if self.skips_by_itself:
            self.optimizer.found_inf = skip  # type: ignore[attr-defined]

    def pieces_in(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return those of `pieces` that are in the groups of this update."""
        return [piece for piece in pieces if piece.group in self.groups]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let a step be taken inside this context, around which the step hooks of the optimizer run once."""
        self._step.is_open = True
        try:
            with step_hooks_run_once(self.optimizer):
                yield
        finally:
            self._step.is_open = False

    @contextmanager
    def with_pieces(self) -> Iterator[None]:
        """Let the groups have all pieces inside this context, for a method that is not `step`."""
        self._set_params(self._pieces)
        try:
            yield
        finally:
            self._set_params(self._shown)

    def state_bytes(self, pieces: Sequence[Piece]) -> int:
        """Return the bytes that the optimizer's states of some pieces take, or will take, on an accelerator."""
        assert self._context is not None
        pieces, expected = self.pieces_in(pieces), self._context.bytes_per_element
        # An optimizer that has skipped every step so far has not made its moments yet.
        in_future = round(sum(expected[piece.group] / 4 * piece.param.nbytes for piece in pieces))
        states = [value for piece in pieces for value in self.optimizer.state.get(piece.param, {}).values()]
        made = sum(max(value.nbytes, MIN_ALLOCATION_BYTES) for value in states if isinstance(value, Tensor))
        return max(made, in_future)

    def move(self, pieces: Sequence[Piece], values: Tensor, new: Callable[[int, torch.dtype], Tensor]) -> None:
        """Make the pieces of a bucket views of `values`, and copy their states to memory from `new(numel, dtype)`."""
        for piece in self.pieces_in(pieces):
            piece.param.data = values[piece.elements.start : piece.elements.stop]
            state = self.optimizer.state.get(piece.param, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[name] = new(value.numel(), value.dtype).copy_(value)
                elif isinstance(value, Tensor) and self.counts_on_device:
                    state[name] = value.to(values.device)

    def begin(self) -> None:
        """Begin an update."""

    def update(self, shards: Shards, unused: Set[Piece]) -> None:
        """Update the pieces of buckets, but `unused` ones. Their scaled gradients may be overwritten."""
        raise NotImplementedError

    def send(self) -> None:
        """Launch what has been prepared; the other buckets are updated meanwhile."""

    def compute(self) -> None:
        """Compute what this rank has put together, and launch the return of the results."""

    def returned(self) -> Iterator[bool]:
        """Iterate over the waits for results, after each of which `apply` is called; yield True with the last one.

        Without it, buckets in `assembled` are not published.
        """
        return iter(())

    def apply(self, bucket: Bucket) -> None:
        """Update the owned pieces of a bucket by the results that have returned."""

    def end(self) -> None:
        """End an update."""

    def states(self) -> dict[str, Tensor]:
        """Return the states of what this rank puts together, by name; they are made if need be."""
        return {}

    def present_states(self) -> list[Tensor]:
        """Return those that have been made."""
        return []

    @property
    def assembled_state_bytes(self) -> float:
        """The bytes of these states on all ranks along the shard axis."""
        return 0.0

    def step_alone(self, pieces: Sequence[Piece], grad: Tensor) -> None:
        """Step the pieces of one whole parameter, which are all in this process; `grad` is its gradient."""
        raise NotImplementedError

    def _set_params(self, params: Mapping[int, list[nn.Parameter]]) -> None:
        for number, group in self.groups.items():
            group["params"] = params[number]


def _check_is_open(step: Step, optimizer: Optimizer, *_: object) -> None:
    if not step.is_open:
        raise RuntimeError(
            f"{type(optimizer).__name__} inside a ZeroOptimizer has no gradients of its own, and its step would update "
            "nothing; call `step` of the ZeroOptimizer"
        )
