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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.autograd_internals import foreach_copy_
from parallel.mesh import Axis, Handle
from zero.optimizers.matrices import Assignment, Matrix, Runs
from zero.partition.layout import Layout, cut


@dataclass(frozen=True)
class Stretch:
    """Consecutive elements of a matrix that one rank owns."""

    matrix: int
    start: int
    """The first element, counted in this tensor rank's part of the matrix."""
    runs: Runs
    """The elements, counted in the parameter."""
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
        """Return memory for what is received: `sent` itself if this rank is alone, which then copies nothing."""
        return sent if self.axis.size == 1 else sent.new_empty(sum(self.received_numels))

    def send(self, sent: Tensor, received: Tensor) -> Handle:
        """Launch the message."""
        return self.axis.all_to_all(
            sent, self.sent_numels, out=received, out_numels=self.received_numels, total_numel=self.total_numel
        )

    def send_back(self, received: Tensor, sent: Tensor) -> Handle:
        """Launch the message in the opposite direction."""
        return self.axis.all_to_all(
            received, self.received_numels, out=sent, out_numels=self.sent_numels, total_numel=self.total_numel
        )

    @property
    def sent_numel(self) -> int:
        return sum(self.sent_numels)


class Places:
    """The places of stretches in a message that consists of a part for each rank."""

    def __init__(self, size: int):
        self._found: list[list[tuple[Any, int, int, Runs]]] = [[] for _ in range(size)]

    def add(self, rank: int, owner: Any, matrix: int, start: int, runs: Runs) -> None:
        """Append a stretch to the part of `rank`; `owner` is returned with it."""
        self._found[rank].append((owner, matrix, start, runs))

    @property
    def numels(self) -> list[int]:
        """The number of elements for each rank."""
        return [sum(runs.numel for *_, runs in part) for part in self._found]

    def stretches(self) -> list[tuple[Any, Stretch]]:
        """Return (owner, stretch) in the order of the message."""
        found, first = [], 0
        for part in self._found:
            for owner, matrix, start, runs in part:
                place = range(first, first + runs.numel)
                found.append((owner, Stretch(matrix, start, runs, place)))
                first = place.stop
        return found


class MatrixExchange:
    """The two messages of one rank, and where each matrix is in them.

    `owned` lists (owner, name of a parameter, the elements of it that this rank owns) in the order of the layout.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        assignment: Assignment,
        layouts: Iterable[Layout],
        owned: Iterable[tuple[Any, str, range]],
        axes: tuple[Axis, Axis],
    ):
        self.matrices, self._places, self._layouts = matrices, assignment.places, list(layouts)
        shard_axis, self._tensor_axis = axes
        # The numbers of the matrices of each parameter, in ascending order.
        self.of_param: defaultdict[str, list[int]] = defaultdict(list)
        for number, matrix in enumerate(matrices):
            self.of_param[matrix.param].append(number)
        sent = Places(shard_axis.size)
        for owner, name, elements in owned:
            for number, start, runs in self._runs(name, elements):
                sent.add(self._places[number][0], owner, number, start, runs)
        received = Places(shard_axis.size)
        own = {number for number, place in enumerate(self._places) if place[0] == shard_axis.rank}
        for layout in self._layouts:
            for rank, number, start, runs in self._stretches(layout, own):
                received.add(rank, None, number, start, runs)
        total = sum(matrix.numel for matrix in matrices)
        self.owned = sent.stretches()
        self.by_shard = Message(shard_axis, sent.numels, received.numels, total)
        self._received: defaultdict[int, list[Stretch]] = defaultdict(list)
        for _, stretch in received.stretches():
            self._received[stretch.matrix].append(stretch)
        self._plan_parts(sorted(own))

    @property
    def own(self) -> list[int]:
        """The numbers of the matrices that this rank computes."""
        return list(self._own_parts)

    def sent_numels(self) -> list[int]:
        """Return the number of elements that each shard rank sends to other shard ranks, there and back."""
        found = [0] * self.by_shard.axis.size
        for layout in self._layouts:
            for owner, number, _, runs in self._stretches(layout, set(range(len(self.matrices)))):
                if (computing := self._places[number][0]) != owner:
                    found[owner] += runs.numel
                    found[computing] += runs.numel
        return found

    def gather_parts(self, received: Tensor) -> Tensor:
        """Return the parts of this shard rank's matrices, each in one piece, in the order of the second message."""
        parts = received.new_empty(self.by_tensor.sent_numel)
        foreach_copy_(*self._pairs(parts, received))
        return parts

    def scatter_parts(self, parts: Tensor, received: Tensor) -> None:
        """Do the opposite of `gather_parts`."""
        in_parts, in_received = self._pairs(parts, received)
        foreach_copy_(in_received, in_parts)

    def computed(self, wholes: Tensor) -> Iterable[tuple[int, list[Tensor]]]:
        """Iterate over the matrices of this rank, each with its number and its parts in the order of tensor ranks."""
        for number, places in self._own_parts.items():
            shape = self.matrices[number].shape
            yield number, [wholes[place.start : place.stop].view(shape) for place in places]

    def _pairs(self, parts: Tensor, received: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of both tensors for each stretch; there is at least one, which is empty."""
        in_parts, in_received = [parts[:0]], [received[:0]]
        for number, first in self._first_in_parts.items():
            for stretch in self._received[number]:
                start = first + stretch.start
                in_parts.append(parts[start : start + len(stretch.place)])
                in_received.append(cut(received, stretch.place))
        return in_parts, in_received

    def _runs(self, name: str, elements: range) -> Iterator[tuple[int, int, Runs]]:
        """Yield (matrix, first element in it, runs) of all matrices among some elements of a parameter."""
        for number in self.of_param.get(name, ()):
            for runs, start in self.matrices[number].runs_in(elements):
                yield number, start, runs

    def _stretches(self, layout: Layout, chosen: set[int]) -> Iterator[tuple[int, int, int, Runs]]:
        """Yield (owner, matrix, first element in it, runs) of the stretches of chosen matrices that all ranks own."""
        for span in layout.spans:
            if chosen.isdisjoint(self.of_param.get(span.name, ())):
                continue
            first = span.elements.start
            for rank, part in layout.shards(span.elements):
                for number, start, runs in self._runs(span.name, range(part.start - first, part.stop - first)):
                    if number in chosen:
                        yield rank, number, start, runs

    def _plan_parts(self, own: list[int]) -> None:
        """Plan the second message: the parts of the matrices of this shard rank, to the tensor rank that computes."""
        axis, num_ranks = self._tensor_axis, self._tensor_axis.size
        computed_by = {number: axis.rank if (rank := self._places[number][1]) is None else rank for number in own}
        sent_numels, received_numels, first = [0] * num_ranks, [0] * num_ranks, 0
        self._first_in_parts: dict[int, int] = {}
        for number in sorted(own, key=lambda number: (computed_by[number], number)):
            self._first_in_parts[number] = first
            first += self.matrices[number].numel
            sent_numels[computed_by[number]] += self.matrices[number].numel
        self._own_parts: dict[int, list[range]] = {n: [] for n in own if computed_by[n] == axis.rank}
        first = 0
        for source in range(num_ranks):
            for number, places in self._own_parts.items():
                numel = self.matrices[number].numel
                if source == axis.rank or self._places[number][1] is not None:
                    places.append(range(first, first + numel))
                    first += numel
                    received_numels[source] += numel
        total = num_ranks * sum(self.matrices[number].numel for number in own)
        self.by_tensor = Message(axis, sent_numels, received_numels, total)


def join(parts: list[Tensor], dim: int | None) -> Tensor:
    """Return the matrix of which tensor ranks have parts."""
    return parts[0] if dim is None else torch.cat(parts, dim)


def take_apart(whole: Tensor, parts: list[Tensor], dim: int | None) -> None:
    """Copy a matrix into its parts."""
    for part, values in zip(parts, whole.chunk(len(parts), dim or 0), strict=True):
        part.copy_(values)
