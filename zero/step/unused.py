"""The parameters that got no gradient in a step: theirs is zero, or, if no rank used them, they are not updated."""

import warnings
from collections.abc import Sequence, Set

import torch
from torch import nn

from parallel.errors import ConfigError
from parallel.mesh import Axis
from zero.step.assembled_updates import AssembledUpdates
from zero.step.pieces import Piece


class UnusedParameters:
    """A filter of what is updated: if it `skips`, without what no rank used, else all, with a warning once."""

    def __init__(
        self, pieces_of: dict[nn.Parameter, list[Piece]], module: nn.Module, assembled: AssembledUpdates, *, skips: bool
    ):
        """Raise ConfigError if it `skips`, and some pieces are `assembled`."""
        if skips and assembled.buckets:
            raise ConfigError(
                "skip_unused=True of ZeroOptimizer cannot leave out parts of whole matrices; choose False"
            )
        self._pieces_of, self._skips = pieces_of, skips
        self._names = {param: name for name, param in module.named_parameters() if param in pieces_of}
        self._params = frozenset(self._names)
        self._warns, self._unused = not skips, frozenset[Piece]()

    def find(self, used: Set[nn.Parameter], axes: Sequence[Axis], device: torch.device) -> None:
        """Find what was not used, given the parameters of which this rank has got a gradient in this step.

        If it `skips`, all ranks along `axes` call it, and the host waits for the answers of the others.
        """
        if self._warns and not used >= self._params:
            self._warns = False
            unused = [name for param, name in self._names.items() if param not in used]
            warnings.warn(
                f"{len(unused)} of {len(self._names)} parameters, such as {unused[0]}, got no gradient on this rank, "
                "where it counts as zero: weight decay and momentum change those that no rank has used; choose "
                "ZeroOptimizer(skip_unused=True) not to update them",
                stacklevel=5,  # the caller of `ZeroOptimizer.step`
            )
        if self._skips:
            num_users = torch.tensor([param in used for param in self._names], dtype=torch.int32, device=device)
            for axis in axes:
                axis.all_reduce(num_users, out=num_users).wait()
            unused_params = (param for param, num in zip(self._names, num_users.tolist(), strict=True) if not num)
            self._unused = frozenset(piece for param in unused_params for piece in self._pieces_of[param])

    def without(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Return the pieces that are updated."""
        return [piece for piece in pieces if piece not in self._unused] if self._unused else pieces
