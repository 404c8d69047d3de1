"""The messages by which matrices reach the ranks that compute them, and by which the results return.

    owned stretches      | for rank 0 ........ | for rank 1 .. | ...     of all matrices, in the order of the layout
                                                                         all-to-all along the shard axis
    received stretches   | from rank 0 ... | from rank 1 ...... | ...    of the matrices of this shard rank
    parts                | for tensor rank 0 .... | for rank 1 ... |     each matrix in one piece
                                                                         all-to-all along the tensor axis
    whole matrices       | from tensor rank 0 ... | from rank 1 ... |    put together, computed, and taken apart again

The results return by the same messages in the opposite direction, to the same places.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from parallel.autograd_internals import foreach_copy_
from parallel.mesh import Axis, Work
from zero.optimizers.matrices import Assignment, Matrix, Runs
from zero.partition.layout import Layout, cut
from zero.step.pieces import Piece


@dataclass(frozen=True)
class Stretch:
    """Consecutive elements of a matrix that one rank owns."""

    matrix: int
    start: int
    """The first element, counted in this tensor rank's part of the matrix."""
    runs: Runs
    """The elements, counted in the piece of the parameter that the rank owns."""
    place: range
    """The elements of the message."""

    def in_message(self, message: Tensor) -> Tensor:
        """Return a view of the stretch in the message, in the shape of the view of `runs`."""
        return cut(message, self.place).view(self.runs.count, self.runs.length)


@dataclass(frozen=True)
class Message:
    """The numbers of elements that this rank sends to each rank of an axis, and gets from each."""

    axis: Axis
    sent_numels: list[int]
    received_numels: list[int]
    total_numel: int

    def receive_buffer(self, sent: Tensor) -> Tensor:
        """Return memory for the received message: `sent` itself if this rank is alone, which then copies nothing."""
        return sent if self.axis.size == 1 else sent.new_empty(sum(self.received_numels))

    def send(self, sent: Tensor, received: Tensor) -> Work:
        """Launch the message."""
        return self.axis.all_to_all(
            sent, self.sent_numels, out=received, out_numels=self.received_numels, total_numel=self.total_numel
        )

    def send_back(self, received: Tensor, sent: Tensor) -> Work:
        """Launch the message in the opposite direction."""
        return self.axis.all_to_all(
            received, self.received_numels, out=sent, out_numels=self.sent_numels, total_numel=self.total_numel
        )


class MatrixExchange:
    """The two messages of one rank, and where each matrix is in them.

    `pieces` are the pieces of parameters with matrices that this rank owns; `axes` are (shard, tensor).
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        assignment: Assignment,
        layouts: Iterable[Layout],
        pieces: Iterable[Piece],
        axes: tuple[Axis, Axis],
    ):
        self.matrices, self.assignment, self._layouts = matrices, assignment, list(layouts)
        self.stretches: defaultdict[Piece, list[Stretch]] = defaultdict(list)
        self._received: list[tuple[range, range]] = []  # of each stretch (place in parts, in the message)
        # The numbers of the matrices of each parameter, in ascending order.
        self.of_param: defaultdict[str, list[int]] = defaultdict(list)
        for number, matrix in enumerate(matrices):
            self.of_param[matrix.param].append(number)
        own = [number for number, (shard, _) in enumerate(assignment.places) if shard == axes[0].rank]
        in_parts = self._plan_parts(own, axes[1])
        self._plan_stretches(pieces, in_parts, axes[0])

    @property
    def own(self) -> list[int]:
        """The numbers of the matrices that this rank computes."""
        return list(self._in_wholes)

    def sent_numels(self) -> list[int]:
        """Return the number of elements that each shard rank sends to other shard ranks, there and back."""
        found = [0] * self.by_shard.axis.size
        for owner, number, _, runs in self._owned_by_all(set(range(len(self.matrices)))):
            if (computing := self.assignment.places[number][0]) != owner:
                found[owner] += runs.numel
                found[computing] += runs.numel
        return found

    def gather_parts(self, received: Tensor) -> Tensor:
        """Return the parts of this shard rank's matrices, each in one piece, in the order of the second message."""
        parts = received.new_empty(sum(self.by_tensor.sent_numels))
        foreach_copy_(*self._pairs(parts, received))
        return parts

    def scatter_parts(self, parts: Tensor, received: Tensor) -> None:
        """Do the opposite of `gather_parts`."""
        in_parts, in_received = self._pairs(parts, received)
        foreach_copy_(in_received, in_parts)

    def computed(self, wholes: Tensor) -> Iterable[tuple[int, list[Tensor]]]:
        """Iterate over the matrices of this rank, each with its number and its parts in the order of tensor ranks."""
        for number, places in self._in_wholes.items():
            yield number, [cut(wholes, place).view(self.matrices[number].shape) for place in places]

    def _pairs(self, parts: Tensor, received: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of both tensors for each stretch; there is at least one, which is empty."""
        in_parts = [cut(parts, place) for place, _ in self._received]
        in_received = [cut(received, place) for _, place in self._received]
        return [parts[:0], *in_parts], [received[:0], *in_received]

    def _runs(self, name: str, elements: range) -> Iterator[tuple[int, int, Runs]]:
        """Yield (matrix, first element in it, runs) of all matrices among some elements of a parameter."""
        for number in self.of_param.get(name, ()):
            for runs, start in self.matrices[number].runs_in(elements):
                yield number, start, runs

    def _owned_by_all(self, chosen: Set[int]) -> Iterator[tuple[int, int, int, Runs]]:
        """Yield (owner, matrix, first element in it, runs) of the stretches of chosen matrices that all ranks own."""
        for layout in self._layouts:
            for span in layout.spans:
                if chosen.isdisjoint(self.of_param.get(span.name, ())):
                    continue
                first = span.elements.start
                for rank, part in layout.shards(span.elements):
                    for number, start, runs in self._runs(span.name, range(part.start - first, part.stop - first)):
                        if number in chosen:
                            yield rank, number, start, runs

    def _plan_stretches(self, pieces: Iterable[Piece], in_parts: dict[int, range], axis: Axis) -> None:
        """Plan the first message: the stretches that this rank owns, to the shard ranks that compute their matrices."""
        places = self.assignment.places
        sent = [(piece, *found) for piece in pieces for found in self._runs(piece.name, piece.in_param)]
        received = list(self._owned_by_all(in_parts.keys()))
        in_sent, sent_numels = _arranged([(places[number][0], runs.numel) for _, number, _, runs in sent], axis.size)
        in_received, received_numels = _arranged([(rank, runs.numel) for rank, _, _, runs in received], axis.size)
        for (piece, number, start, runs), place in zip(sent, in_sent, strict=True):
            self.stretches[piece].append(Stretch(number, start, runs, place))
        for (_, number, start, runs), place in zip(received, in_received, strict=True):
            first = in_parts[number].start + start
            self._received.append((range(first, first + runs.numel), place))
        total = sum(matrix.numel for matrix in self.matrices)
        self.by_shard = Message(axis, sent_numels, received_numels, total)

    def _plan_parts(self, own: Sequence[int], axis: Axis) -> dict[int, range]:
        """Plan the second message: the parts of the matrices of this shard rank, to the tensor rank that computes them.

        Return the place of each part in the sent message.
        """
        computed_by = {number: self.assignment.places[number][1] for number in own}  # None: each rank its own part
        sent = [(axis.rank if (rank := computed_by[number]) is None else rank, number) for number in own]
        received = [
            (source, number)
            for source in range(axis.size)
            for rank, number in sent
            if rank == axis.rank and (source == axis.rank or computed_by[number] is not None)
        ]
        in_sent, sent_numels = _arranged([(rank, self.matrices[n].numel) for rank, n in sent], axis.size)
        in_received, received_numels = _arranged([(rank, self.matrices[n].numel) for rank, n in received], axis.size)
        self._in_wholes: dict[int, list[range]] = {number: [] for rank, number in sent if rank == axis.rank}
        for (_, number), place in zip(received, in_received, strict=True):
            self._in_wholes[number].append(place)
        total = axis.size * sum(self.matrices[number].numel for number in own)
        self.by_tensor = Message(axis, sent_numels, received_numels, total)
        return dict(zip(own, in_sent, strict=True))


def _arranged(items: Sequence[tuple[int, int]], size: int) -> tuple[list[range], list[int]]:
    """Return the place of each item (rank, numel) in a message with a part for each rank, and the parts' numels."""
    numels = [0] * size
    for rank, numel in items:
        numels[rank] += numel
    first, places = [0, *accumulate(numels)], []
    for rank, numel in items:
        places.append(range(first[rank], first[rank] + numel))
        first[rank] += numel
    return places, numels


def join(parts: list[Tensor], dim: int | None) -> Tensor:
    """Join the parts that tensor ranks have of a matrix."""
    return parts[0] if dim is None else torch.cat(parts, dim)


def take_apart(whole: Tensor, parts: list[Tensor], dim: int | None) -> None:
    """Copy a matrix into its parts."""
    for part, values in zip(parts, whole.chunk(len(parts), dim or 0), strict=True):
        part.copy_(values)
