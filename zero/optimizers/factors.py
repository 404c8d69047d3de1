"""Low-rank factors of matrices, and the messages by which the owner of a matrix adds the rows that ranks have of them.

    held      | rows for owner 0 ... | for owner 1 .. | ...    of the parts of matrices that this rank has
                                                               all-to-all along the shard axis
    received  | from rank 0 ... | from rank 1 ....... | ...    two parts may have the same row, which is then added
    wholes    | a factor | a factor | ...                      of own matrices, and added along the tensor axis

Rows of the results return by the same messages in the opposite direction, to the same places.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel.mesh import Axis
from zero.optimizers.exchange import Message, arranged
from zero.optimizers.matrices import Matrix, Runs
from zero.partition.layout import Layout, cut


@dataclass(frozen=True, eq=False)
class Part:
    """The rows that a rank has of a factor of one matrix, counted in the whole factor."""

    rank: int
    matrix: int
    rows: range


@dataclass(frozen=True)
class Share:
    """Consecutive elements of a matrix in one piece of a parameter."""

    runs: list[Runs]
    """The elements, counted in the piece."""
    start: int
    """The first of them, counted from the beginning of its row."""
    columns: int
    """The length of a row."""
    left: Part
    """The rows of P, and of B Q, that have these elements."""
    right: Part
    """The rows of R: one for each column, and that of inverse lengths; the same for all shares of a rank."""

    def elements(self, rows: Tensor) -> Iterator[tuple[Runs, Tensor]]:
        """Iterate over the runs, each with a view of its elements in complete rows."""
        flat, start = rows.view(-1), self.start
        for runs in self.runs:
            yield runs, flat[start : start + runs.numel].view(runs.count, runs.length)
            start += runs.numel

    def rows_of(self, momentum: Tensor, like: Tensor) -> Tensor:
        """Return complete rows (rows, columns), with zeros for what other ranks have, in the type of `like`."""
        rows = like.new_zeros(len(self.left.rows), self.columns)
        for runs, elements in self.elements(rows):
            elements.copy_(runs.view(momentum))
        return rows


class Factor:
    """A factor of each of some matrices: the rows that this rank holds, and whole ones of the matrices that it owns."""

    def __init__(
        self,
        parts: Sequence[Part],
        owners: Sequence[int],
        shapes: Sequence[tuple[int, int]],
        batches: Sequence[tuple[list[int], bool]],
        axes: tuple[Axis, Axis],
    ):
        """`parts` are those of all ranks, in one order on all, `shapes` those of whole factors, by matrix.

        `batches` are the matrices that this rank owns, those that tensor ranks have parts of (True) first; `axes`:
        (shard, tensor).
        """
        shard, self._tensor = axes

        def numel(part: Part) -> int:
            return len(part.rows) * shapes[part.matrix][1]

        held = [part for part in parts if part.rank == shard.rank]
        received = [part for part in parts if owners[part.matrix] == shard.rank]
        places, sent_numels = arranged([(owners[part.matrix], numel(part)) for part in held], shard.size)
        self._held_places = dict(zip(held, places, strict=True))
        received_places, received_numels = arranged([(part.rank, numel(part)) for part in received], shard.size)
        self._message = Message(shard, sent_numels, received_numels, sum(map(numel, parts)))
        self.sent_numels = [0] * shard.size
        """The number of elements that each shard rank sends to others, there and back."""
        for part in parts:
            if part.rank != owners[part.matrix]:
                self.sent_numels[part.rank] += numel(part)
                self.sent_numels[owners[part.matrix]] += numel(part)
        self._batches: list[tuple[list[int], range, tuple[int, int]]] = []  # (matrices, elements of `wholes`, shape)
        self._numel_of_wholes = self._joined_numel = 0
        starts: dict[int, int] = {}
        for numbers, is_joined in batches:
            rows, columns = shapes[numbers[0]]
            elements = range(self._numel_of_wholes, self._numel_of_wholes + len(numbers) * rows * columns)
            starts |= zip(numbers, elements[:: rows * columns], strict=True)
            self._batches.append((numbers, elements, (rows, columns)))
            self._numel_of_wholes = elements.stop
            self._joined_numel = self._numel_of_wholes if is_joined else self._joined_numel
        self._received_rows: list[tuple[range, range]] = []  # (elements of `wholes`, of the message)
        for part, place in zip(received, received_places, strict=True):
            start = starts[part.matrix] + part.rows.start * shapes[part.matrix][1]
            self._received_rows.append((range(start, start + numel(part)), place))

    def begin(self, dtype: torch.dtype, device: torch.device) -> None:
        """Begin an update, with zeros in all held rows."""
        self._held = torch.zeros(sum(self._message.sent_numels), dtype=dtype, device=device)
        self._received = self._message.receive_buffer(self._held)

    def held(self, part: Part) -> Tensor:
        """Return a view (rows, columns) of a part of this rank."""
        return cut(self._held, self._held_places[part]).view(len(part.rows), -1)

    def send(self) -> None:
        """Launch the message with the held rows."""
        self._work = self._message.send(self._held, self._received)

    def new_wholes(self) -> Tensor:
        """Return zeros for the whole factors of own matrices."""
        return self._held.new_zeros(self._numel_of_wholes)

    def add_up(self) -> Tensor:
        """Wait for the message, and return the sums of the rows of all ranks, as whole factors of own matrices."""
        self._work.wait()
        wholes = self.new_wholes()
        for rows, received in self._pairs(wholes):
            rows.add_(received)
        if joined := self._joined_numel:
            self._tensor.all_reduce(own := wholes[:joined], out=own).wait()
        return wholes

    def batches(self, wholes: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """Iterate over batches of matrices of one kind: their numbers, and factors (number, rows, columns)."""
        for numbers, elements, shape in self._batches:
            yield numbers, cut(wholes, elements).view(-1, *shape)

    def send_back(self, wholes: Tensor) -> None:
        """Launch the message with the rows of whole factors to the ranks that hold them."""
        for rows, received in self._pairs(wholes):
            received.copy_(rows)
        self._work = self._message.send_back(self._received, self._held)

    def wait(self) -> None:
        """Wait until the rows have returned."""
        self._work.wait()

    def end(self) -> None:
        """End an update: free the messages."""
        del self._held, self._received

    def _pairs(self, wholes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the rows of each received part, in the whole factors and in the message."""
        for elements, place in self._received_rows:
            yield cut(wholes, elements), cut(self._received, place)


def shares_of_all(
    matrices: Sequence[Matrix], layouts: Iterable[Layout], tensor: Axis
) -> Iterator[tuple[str, int, Share]]:
    """Yield (parameter, first element in it, share) of what each rank has of the matrices, in the order of layouts."""
    rights: dict[tuple[int, int], Part] = {}  # by (matrix, rank)
    of_param: defaultdict[str, list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        of_param[matrix.param].append(number)
    for layout in layouts:
        for span in layout.spans:
            first = span.elements.start
            for rank, part in layout.shards(span.elements) if span.name in of_param else ():
                elements = range(part.start - first, part.stop - first)
                for number in of_param[span.name]:
                    if share := _share_of(rank, number, matrices[number], elements, tensor.rank):
                        right = rights.setdefault((number, rank), share.right)
                        yield span.name, elements.start, replace(share, right=right)


def _share_of(rank: int, number: int, matrix: Matrix, elements: range, tensor_rank: int) -> Share | None:
    """Return what a rank has of a matrix among `elements` of its parameter: they are consecutive in both."""
    if not (found := list(matrix.runs_in(elements))):
        return None
    (num_rows, columns), runs, start = matrix.shape, [one for one, _ in found], found[0][1]
    stop = start + sum(one.numel for one in runs)
    before = tensor_rank * num_rows if matrix.joined_dim == 0 else 0
    left = Part(rank, number, range(before + start // columns, before - (-stop // columns)))
    before = tensor_rank * (columns + 1) if matrix.joined_dim == 1 else 0
    return Share(runs, start % columns, columns, left, Part(rank, number, range(before, before + columns + 1)))
