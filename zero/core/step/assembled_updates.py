"""The updates of what is put together from the pieces of many ranks, if the optimizer declares such atoms.

The optimizer brings them: zero/updates/matrix_updates.py has those of matrices.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

from torch import Tensor, nn

from parallel.mesh import Axis
from zero.core.buckets.bucket import Bucket
from zero.core.protocols.home import Homes
from zero.core.step.atoms import atom_of
from zero.core.step.pieces import OwnedPieces, Piece

Axes = tuple[Axis, Axis, Axis]  # (shard, replica, tensor)


class ShardedModel(Protocol):
    """The part of `ZeroDataParallel` that updates need."""

    module: nn.Module
    homes: Homes

    @property
    def shard_axis(self) -> Axis: ...

    @property
    def replica_axis(self) -> Axis: ...

    @property
    def is_exact(self) -> bool: ...


class AssembledUpdates:
    """The updates around those of the torch optimizer, in parts of a step that follow each other; here, of nothing.

    All ranks call all parts, in the order of the methods.
    """

    buckets: Set[Bucket] = frozenset()
    """The buckets in which any rank owns a piece that is put together: the same on all ranks."""

    def __init__(self, pieces: OwnedPieces):
        self.other_pieces: Mapping[Bucket, Sequence[Piece]] = pieces.by_bucket  # that the torch optimizer steps

    def begin(self) -> None:
        """Begin an update."""

    def prepare(self, bucket: Bucket, grad: Tensor) -> None:
        """Prepare what is sent of a bucket; `grad` is its flat gradient."""

    def send(self) -> None:
        """Send it; the other buckets are updated meanwhile."""

    def compute(self) -> None:
        """Compute what this rank has put together, and return the results."""

    def returned(self) -> Iterator[bool]:
        """Iterate over the waits for results, after each of which all buckets are updated; True with the last one."""
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
    def state_bytes(self) -> float:
        """The bytes of the states of all ranks along the shard axis."""
        return 0.0


def assembled_updates(inner: Any, model: ShardedModel, pieces: OwnedPieces, tensor: Axis) -> AssembledUpdates:
    """Return the updates of what the torch optimizer `inner` declares that it needs whole, of its `updates_class`."""
    groups = {number for number in pieces.group_of.values() if atom_of(inner, inner.param_groups[number]).is_assembled}
    if not groups:
        return AssembledUpdates(pieces)
    axes = model.shard_axis, model.replica_axis, tensor
    # One by one: bits of what is computed in batches may depend on their size, and so on the number of ranks.
    return inner.updates_class(inner, groups, model.module, pieces, axes, model.homes, one_by_one=model.is_exact)
