"""The matrices of parameters, and the rank that computes each of them.

A parameter holds one matrix, or several whose rows take turns, such as the q, k and v of each attention head:

    rows of the parameter     q q k k v v | q q k k v v | ...     packed_rows = (2, 2, 2)
    matrix 1 of 3             . . k k . . | . . k k . . | ...     a row of repetitions; each has `rows` of the `period`
    with `per_repetition`     . . 1 1 . . | . . 4 4 . . | ...     each repetition, here a head, has matrices of its own

This file is arithmetic on shapes: it is the same on every rank.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from parallel.validation.errors import ConfigError
from zero.core.partition.layout import Layout


@dataclass(frozen=True)
class Runs:
    """`count` runs of `length` consecutive elements of a flat tensor; they begin `distance` elements apart."""

    start: int
    count: int
    length: int
    distance: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.count * self.length

    def view(self, flat: Tensor) -> Tensor:
        """Return a view (count, length) of these elements."""
        stop = self.start + (self.count - 1) * self.distance + self.length
        return flat[self.start : stop].unfold(0, self.length, self.distance)


@dataclass(frozen=True)
class Matrix:
    """A matrix in a parameter of one tensor rank; the parts of several tensor ranks may be put together."""

    param: str
    """The name of the parameter."""
    shape: tuple[int, int]
    """The shape of this tensor rank's part."""
    rows: range
    """The rows of each repetition that belong to the matrix."""
    period: int
    """The number of rows of a repetition."""
    group: int
    """The number of the parameter group."""
    joined_dim: int | None = None
    """The dim along which the parts of all tensor ranks are put together; None if each rank's part is a matrix."""
    num_parts: int = 1
    """The number of tensor ranks whose parts are put together."""
    is_repetition: bool = False
    """Whether it has rows of one repetition only; tensor ranks that divide the parameter have different ones."""

    @property
    def numel(self) -> int:
        """The number of elements of this tensor rank's part."""
        return self.shape[0] * self.shape[1]

    @property
    def kind(self) -> tuple[int, int, int, int, int]:
        """The properties that matrices computed as one batch have in common."""
        return *self.shape, self.num_parts, -1 if self.joined_dim is None else self.joined_dim, self.group

    @property
    def whole_shape(self) -> tuple[int, int]:
        """The shape of the matrix that is computed."""
        rows, columns = self.shape
        return (
            rows * (self.num_parts if self.joined_dim == 0 else 1),
            columns * self.num_parts ** (self.joined_dim == 1),
        )

    def runs_in(self, elements: range) -> Iterator[tuple[Runs, int]]:
        """Iterate over the elements of the matrix among `elements` of the parameter, in ascending order.

        Yields at most three times (runs, counted from the first of `elements`; the first one counted in the matrix):
        repetitions that are complete are yielded together.
        """
        columns = self.shape[1]
        own_numel, distance = len(self.rows) * columns, self.period * columns
        numbers = range(elements.start // distance, -(-elements.stop // distance))
        for some in (numbers[:1], numbers[1:-1], numbers[1:][-1:]):
            if some:
                first = some[0] * distance + self.rows.start * columns
                start = max(first, elements.start)
                length = min(first + own_numel, elements.stop) - start
                if length > 0:
                    runs = Runs(start - elements.start, len(some), length, distance)
                    yield runs, some[0] * own_numel + start - first


def matrices_of(
    name: str,
    shape: Sequence[int],
    group: int,
    packed_rows: Sequence[int] | None = None,
    split_dim: int | None = None,
    tensor_size: int = 1,
    *,
    per_repetition: bool = False,
) -> list[Matrix]:
    """Return the matrices of one parameter, in the order in which they are packed.

    `shape` is the shape of this tensor rank's part, `split_dim` the dim along which the parts of `tensor_size` ranks
    are put together: not those of single repetitions, which are whole on each rank. A parameter without elements has no
    matrix. Raises ConfigError if the parameter is not a matrix, or the rows are not whole repetitions.
    """
    if len(shape) != 2:
        raise ConfigError(
            f"{name} of shape {tuple(shape)} has {len(shape)} dims and is no matrix; give it to another "
            "optimizer of the list, such as AdamW"
        )
    num_rows, columns = shape
    if not num_rows * columns:
        return []
    numbers = list(packed_rows or [num_rows])
    period = sum(numbers)
    if not period or num_rows % period:
        raise ConfigError(
            f"{name} has {num_rows} rows, which are not whole repetitions of packed_rows={tuple(numbers)}, {period} "
            "rows; correct the `packed_rows` of its module"
        )
    is_repetition = per_repetition and packed_rows is not None
    if is_repetition:
        numbers, period, split_dim = numbers * (num_rows // period), num_rows, None
    elif len(numbers) == 1:
        numbers, period = [num_rows], num_rows
    num_parts = tensor_size if split_dim is not None else 1
    found, first = [], 0
    for number in numbers:
        rows = range(first, first + number)
        shape = num_rows // period * number, columns
        joined_dim = split_dim if num_parts > 1 else None
        found.append(Matrix(name, shape, rows, period, group, joined_dim, num_parts, is_repetition))
        first += number
    return found


@dataclass(frozen=True)
class Assignment:
    """The rank that computes each matrix, along the shard axis and along the tensor axis, and the work of each rank."""

    places: list[tuple[int, int | None]]
    """For each matrix (data rank, tensor rank); None: every tensor rank of this data rank computes its own."""
    flops: list[list[int]]
    """Of each data rank and each tensor rank."""

    @property
    def all_flops(self) -> list[int]:
        """The FLOPs of every rank."""
        return [flops for of_data_rank in self.flops for flops in of_data_rank]


def assign(
    matrices: Sequence[Matrix], flops_of: Callable[[Matrix], int], num_ranks: int, tensor_size: int = 1
) -> Assignment:
    """Assign matrices to `num_ranks` data ranks and to their tensor ranks, the longest first.

    Each goes to the rank that has least to compute so far, and of several to the one that receives least.
    """
    loads = [[(0, 0)] * tensor_size for _ in range(num_ranks)]  # (FLOPs, elements) so far
    places: dict[int, tuple[int, int | None]] = {}  # by the number of the matrix
    costs = [flops_of(matrix) for matrix in matrices]
    least = [(0, 0, rank, tensor) for rank in range(num_ranks) for tensor in range(tensor_size)]
    for number in sorted(range(len(matrices)), key=lambda number: -costs[number]):
        is_joined = matrices[number].num_parts == tensor_size
        while (now := (*loads[least[0][2]][least[0][3]], *least[0][2:])) != least[0]:  # it got more since
            heapq.heapreplace(least, now)
        rank = least[0][2] if is_joined else min(range(num_ranks), key=lambda rank: max(loads[rank]))
        for tensor in [least[0][3]] if is_joined else range(tensor_size):
            flops, numel = loads[rank][tensor]
            loads[rank][tensor] = flops + costs[number], numel + matrices[number].numel
        places[number] = rank, least[0][3] if is_joined else None
    flops_of_ranks = [[flops for flops, _ in of_data_rank] for of_data_rank in loads]
    return Assignment([places[number] for number in range(len(matrices))], flops_of_ranks)


def near_owners(
    assignment: Assignment,
    matrices: Sequence[Matrix],
    flops_of: Callable[[Matrix], int],
    layouts: Iterable[Layout],
    num_shards: int,
) -> Assignment:
    """Return an assignment in which matrices with equal work have changed places, so that less of them is sent.

    Each goes to the rank that owns most of its elements and has a place, beginning with those of which most is owned.
    """
    owned = Counter[tuple[int, int]]()  # elements, by (matrix, shard rank)
    for owner, number, _, runs in owned_by_all(matrices, range(len(matrices)), layouts):
        owned[number, owner] += runs.numel
    work = [(flops_of(matrix), matrix.numel, matrix.num_parts) for matrix in matrices]
    free: defaultdict[tuple[int, ...], defaultdict[int, list[tuple[int, int | None]]]]
    free = defaultdict(lambda: defaultdict(list))  # places, by work and shard rank
    for key, place in zip(work, assignment.places, strict=True):
        free[key][place[0] % num_shards].append(place)
    places: dict[int, tuple[int, int | None]] = {}
    for (number, owner), _ in owned.most_common():
        if number not in places and (of_owner := free[work[number]][owner]):
            places[number] = of_owner.pop(0)
    for number, key in enumerate(work):
        if number not in places:
            places[number] = next(filter(None, free[key].values())).pop(0)
    return replace(assignment, places=[places[number] for number in range(len(matrices))])


def owned_by_all(
    matrices: Sequence[Matrix], chosen: Iterable[int], layouts: Iterable[Layout]
) -> Iterator[tuple[int, int, int, Runs]]:
    """Yield (owner, matrix, first element in it, runs) of the stretches of chosen matrices that all ranks own."""
    of_param = numbers_by_param(matrices, chosen)
    for layout in layouts:
        for span in layout.spans:
            first = span.elements.start
            for rank, part in layout.shards(span.elements) if span.name in of_param else ():
                for number in of_param[span.name]:
                    for runs, start in matrices[number].runs_in(range(part.start - first, part.stop - first)):
                        yield rank, number, start, runs


def numbers_by_param(matrices: Sequence[Matrix], chosen: Iterable[int]) -> dict[str, list[int]]:
    """Return the numbers of chosen matrices, ascending, by the name of their parameter."""
    of_param: defaultdict[str, list[int]] = defaultdict(list)
    for number in sorted(chosen):
        of_param[matrices[number].param].append(number)
    return of_param
