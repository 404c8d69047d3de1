"""The messages by which some matrices reach the ranks that compute them, and by which the results return.

    owned stretches      | for replica 0: rank 0 .... | rank 1 .. | kept |0| for replica 1: rank 0 .. | ... | 0 |
                                                                         its own part: all-to-all along the shard axis
    received stretches   | from rank 0 ... | from rank 1 ...... | ...    of the matrices of this shard rank
    parts                | for tensor rank 0 .... | for rank 1 ... |     each matrix in one piece, also of what is kept
                                                                         all-to-all along the tensor axis
    whole matrices       | from tensor rank 0 ... | from rank 1 ... |    put together, computed, and taken apart again

The results return by the same messages in the opposite direction, to the same places. Replicas own the same stretches
and compute different matrices, so an all-gather in place along the replica axis ends it; the parts for replicas have
the length of the longest. Matrices of one kind follow each other, and are computed as one batch.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from parallel.autograd_internals import foreach_copy_
from parallel.mesh import Axis, Work
from zero.core.partition.layout import Layout, cut, shifted
from zero.core.step.pieces import Piece
from zero.core.step.update import Axes
from zero.updates.matrices import Assignment, Matrix, Runs, numbers_by_param, owned_by_all

MOST_BATCH_BYTES = 2**28


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


@dataclass(frozen=True)
class Batch:
    """Matrices of one kind that this rank computes: of one shape, put together in one way, with one rate."""

    numbers: list[int]
    places: list[range]
    """The elements of whole matrices: the parts of all of them, from each tensor rank."""


class MatrixExchange:
    """The messages of one rank for the matrices with some numbers, `chosen`, and where each matrix is in them.

    `pieces` are the pieces of parameters with matrices that this rank owns; `axes` are (shard, replica, tensor).
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        chosen: Set[int],
        assignment: Assignment,
        layouts: Iterable[Layout],
        pieces: Iterable[Piece],
        axes: Axes,
    ):
        self.matrices, self.assignment, self._layouts, self._chosen = matrices, assignment, list(layouts), chosen
        shard, self.by_replica, tensor = axes
        data_rank = self.by_replica.rank * shard.size + shard.rank
        self.stretches: defaultdict[Piece, list[Stretch]] = defaultdict(list)
        # Of each stretch (place in parts, in the received message or among owned stretches).
        self._received: list[tuple[range, range]] = []
        self._kept: list[tuple[range, range]] = []
        own = sorted((n for n in chosen if assignment.places[n][0] == data_rank), key=lambda n: matrices[n].kind)
        in_parts = self._plan_parts(own, tensor)
        self._plan_stretches(pieces, in_parts, shard)

    @property
    def own(self) -> list[int]:
        """The numbers of the matrices that this rank computes."""
        return [number for batch in self._batches for number in batch.numbers]

    @property
    def sent_part(self) -> range:
        """The elements of owned stretches whose matrices are computed by other shard ranks of this replica."""
        start = self.by_replica.rank * self._part_numel
        return range(start, start + sum(self.by_shard.sent_numels))

    @property
    def numel(self) -> int:
        """The number of elements of all owned stretches, with those between the parts for replicas."""
        return self.by_replica.size * self._part_numel

    def gather(self, updates: Tensor) -> Work:
        """Launch the all-gather of owned stretches along the replica axis."""
        if not updates.numel():
            return Work()
        return self.by_replica.all_gather(updates.chunk(self.by_replica.size)[self.by_replica.rank], out=updates)

    def sent_numels(self) -> list[int]:
        """Return the number of elements that each data rank sends to other shard ranks, there and back."""
        num_shards = self.by_shard.axis.size
        found = [0] * (num_shards * self.by_replica.size)
        for owner, number, _, runs in owned_by_all(self.matrices, self._chosen, self._layouts):
            replica, computing = divmod(self.assignment.places[number][0], num_shards)
            if computing != owner:
                found[replica * num_shards + owner] += runs.numel
                found[replica * num_shards + computing] += runs.numel
        return found

    def gather_parts(self, received: Tensor, owned: Tensor) -> Tensor:
        """Return the parts of this shard rank's matrices, each in one piece, in the order of the second message.

        `owned` are all owned stretches, of which some are kept.
        """
        parts = received.new_empty(sum(self.by_tensor.sent_numels))
        foreach_copy_(*self._pairs(parts, received, owned))
        return parts

    def scatter_parts(self, parts: Tensor, received: Tensor, owned: Tensor) -> None:
        """Do the opposite of `gather_parts`."""
        in_parts, sources = self._pairs(parts, received, owned)
        foreach_copy_(sources, in_parts)

    def batches(self, wholes: Tensor, *, max_size: int | None = None) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Iterate over batches of at most `max_size` matrices: their numbers, and their parts by tensor ranks.

        Without `max_size` a batch has at most `MOST_BATCH_BYTES`, or one matrix, because the iteration needs several
        times its memory. A part has the shape (number of matrices, rows, columns).
        """
        for batch in self._batches:
            matrix_bytes = self.matrices[batch.numbers[0]].numel * len(batch.places) * wholes.itemsize
            size = max_size or max(1, MOST_BATCH_BYTES // matrix_bytes)
            parts = [cut(wholes, place).view(-1, *self.matrices[batch.numbers[0]].shape) for place in batch.places]
            for first in range(0, len(batch.numbers), size):
                yield batch.numbers[first : first + size], [part[first : first + size] for part in parts]

    def _pairs(self, parts: Tensor, received: Tensor, owned: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views for each stretch, in the parts and where it comes from, of which the first ones are empty."""
        in_parts, sources = [parts[:0]], [received[:0]]
        for source, places in ((received, self._received), (owned, self._kept)):
            in_parts += [cut(parts, place) for place, _ in places]
            sources += [cut(source, place) for _, place in places]
        return in_parts, sources

    def _plan_stretches(self, pieces: Iterable[Piece], in_parts: dict[int, range], axis: Axis) -> None:
        """Plan the first message: the stretches that this rank owns, to the shard ranks that compute their matrices.

        Those of matrices that it computes itself are kept, behind the others.
        """
        ranks, replica = self.assignment.places, self.by_replica
        of_param = numbers_by_param(self.matrices, self._chosen)
        sent = [
            (piece, number, start, runs)
            for piece in pieces
            for number in of_param.get(piece.name, ())
            for runs, start in self.matrices[number].runs_in(piece.in_param)
        ]
        received = [found for found in owned_by_all(self.matrices, in_parts, self._layouts) if found[0] != axis.rank]
        num_parts = axis.size + 1  # of each replica
        of_sent = []  # the part of each stretch, and its length
        for _, number, _, runs in sent:
            computing_replica, rank = divmod(ranks[number][0], axis.size)
            of_sent.append((computing_replica * num_parts + (axis.size if rank == axis.rank else rank), runs.numel))
        in_sent, numels = arranged(of_sent, replica.size * num_parts)
        numels_of_replicas = [numels[first : first + num_parts] for first in range(0, len(numels), num_parts)]
        self._part_numel = max(sum(of_replica) for of_replica in numels_of_replicas)
        sent_numels = numels_of_replicas[replica.rank][: axis.size]
        before = [0, *accumulate(sum(of_replica) for of_replica in numels_of_replicas)]
        in_received, received_numels = arranged([(rank, runs.numel) for rank, _, _, runs in received], axis.size)
        for (piece, number, start, runs), place in zip(sent, in_sent, strict=True):
            computing = ranks[number][0] // axis.size
            moved = computing * self._part_numel - before[computing]
            place = shifted(place, -moved)
            self.stretches[piece].append(Stretch(number, start, runs, place))
            if number in in_parts:
                self._kept.append((shifted(range(start, start + runs.numel), -in_parts[number].start), place))
        for (_, number, start, runs), place in zip(received, in_received, strict=True):
            self._received.append((shifted(range(start, start + runs.numel), -in_parts[number].start), place))
        of_replica = (number for number in self._chosen if ranks[number][0] // axis.size == replica.rank)
        total = sum(self.matrices[number].numel for number in of_replica)
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
        in_sent, sent_numels = arranged([(rank, self.matrices[n].numel) for rank, n in sent], axis.size)
        in_received, received_numels = arranged([(rank, self.matrices[n].numel) for rank, n in received], axis.size)
        in_wholes: dict[int, list[range]] = {number: [] for rank, number in sent if rank == axis.rank}
        for (_, number), place in zip(received, in_received, strict=True):
            in_wholes[number].append(place)
        self._batches = []
        for _, numbers in groupby(in_wholes, key=lambda number: self.matrices[number].kind):
            alike = list(numbers)
            ends = zip(in_wholes[alike[0]], in_wholes[alike[-1]], strict=True)
            self._batches.append(Batch(alike, [range(first.start, last.stop) for first, last in ends]))
        total = axis.size * sum(self.matrices[number].numel for number in own)
        self.by_tensor = Message(axis, sent_numels, received_numels, total)
        return dict(zip(own, in_sent, strict=True))


def arranged(items: Sequence[tuple[int, int]], size: int) -> tuple[list[range], list[int]]:
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
    """Join the parts (number, rows, columns) that tensor ranks have of matrices along a dim of the matrices."""
    return parts[0] if dim is None else torch.cat(parts, dim + 1)


def take_apart(wholes: Tensor, parts: list[Tensor], dim: int | None) -> None:
    """Copy matrices into their parts, unless they are the same memory."""
    if dim is not None:
        for part, values in zip(parts, wholes.chunk(len(parts), dim + 1), strict=True):
            part.copy_(values)
