"""Logical tensors of a saved state: any elements of any parameter, of its weights or its moments, by name.

A rank of any layout reads the elements that it needs from the files of the layout that was saved. No file is converted,
and no rank holds more than the elements that it reads.

    parameter, cut along the tensor axis   row k of a rank | row k of the next | ...   a reader names a part and a range
    one rank's part, flat, in its buffer   | ... span ... |                            `Layout` tells which rank owns it
    a rank's file                          "3.exp_avg.640": buffer 3, from its element 640 on
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.errors import ConfigError
from zero.layout import Layout, Span, cut_into_buckets
from zero.state.tensor_file import TensorFile

MASTER = "master"  # the kind of tensor that every parameter has: its weights
MAX_OPEN_FILES = 32
BLOCK_NUMEL = 2**22  # elements read at once if only some columns of the parameter are needed


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of the file that a rank writes."""
    return folder / f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class TensorRank:
    """A position along a tensor axis, which determines a part of each parameter; (0, 1) stands for all of it."""

    rank: int = 0
    size: int = 1


WHOLE = TensorRank()


@dataclass(frozen=True)
class SavedParameter:
    """A parameter, and the position of each tensor rank's part in its buffer."""

    shape: torch.Size  # of the whole parameter
    dim: int | None  # along which it is cut; None if every tensor rank has all of it
    buffer: int
    elements: range  # in the buffer


class SavedFile(TensorFile):
    """The file of one rank, with an index of the ranges of buffers that it contains."""

    def __init__(self, path: Path):
        super().__init__(path)
        starts: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for name in self.entries:
            buffer, _, rest = name.partition(".")
            kind, _, start = rest.rpartition(".")
            if buffer.isdecimal() and start.isdecimal():
                starts[int(buffer), kind].append(int(start))
        self._starts = {key: sorted(found) for key, found in starts.items()}

    def kinds_at(self, buffer: int, start: int) -> list[str]:
        """Return the kinds of tensors that begin with this element of the buffer."""
        kinds = [kind for number, kind in self._starts if number == buffer]
        return [kind for kind in kinds if f"{buffer}.{kind}.{start}" in self.entries]

    def holder(self, buffer: int, kind: str, element: int) -> tuple[str, int]:
        """Return the name of the tensor that contains an element of the buffer, and the tensor's first element.

        Raises ConfigError if the file contains no such tensor.
        """
        starts = self._starts.get((buffer, kind), [])
        index = bisect_right(starts, element) - 1
        if index < 0:
            raise ConfigError(
                f"{self.path} does not match layout.json: it lacks values of {kind}; choose another checkpoint"
            )
        return f"{buffer}.{kind}.{starts[index]}", starts[index]


def describe_layout(layout: Layout) -> dict[str, Any]:
    """Return names, shapes and starts, for JSON.

    Buckets and shards follow from them by arithmetic: the description does not grow with their number.
    """
    return {
        "numel": layout.numel,
        "bucket_numel": len(layout.buckets[0].elements),
        "num_shards": layout.buckets[0].num_shards,
        "spans": {span.name: [list(span.shape), span.elements.start] for span in layout.spans},
    }


def _layout(description: dict[str, Any]) -> Layout:
    """Return the layout that `describe_layout` has described."""
    spans = []
    for name, (shape, start) in description["spans"].items():
        spans.append(Span(name, torch.Size(shape), range(start, start + torch.Size(shape).numel())))
    buckets = cut_into_buckets(description["numel"], description["bucket_numel"], description["num_shards"])
    return Layout(tuple(spans), buckets)


class SavedState:
    """A reader of the files that all ranks of one layout wrote into `folder`.

    `description` is the result of `owned_state.describe_state` on those ranks.
    """

    def __init__(self, folder: Path, description: dict[str, Any]):
        self.folder = folder
        self.data_size, self.tensor_size = description["data_size"], description["tensor_size"]
        self._layouts = [_layout(buffer) for buffer in description["buffers"]]
        self.parameters = _parameters(self._layouts, description["split_dims"], self.tensor_size)
        self.file = lru_cache(MAX_OPEN_FILES)(lambda rank: SavedFile(rank_file(folder, rank)))

    @property
    def num_files(self) -> int:
        """The number of the ranks' files."""
        return self.data_size * self.tensor_size

    def state_kinds(self, name: str) -> list[str]:
        """Return the kinds of optimizer state of a parameter, such as exp_avg, exp_avg_sq and step."""
        parameter = self.parameters[name]
        if not parameter.elements:
            return []
        kinds = self._first_file(parameter).kinds_at(parameter.buffer, parameter.elements.start)
        return sorted(set(kinds) - {MASTER})

    def scalar(self, name: str, kind: str) -> Tensor | None:
        """Return 0-dim state of a parameter, such as a step counter; None if the state has a value for each element."""
        parameter = self.parameters[name]
        file, first = self._first_file(parameter), f"{parameter.buffer}.{kind}.{parameter.elements.start}"
        return None if file.entries[first].shape else file.tensor(first)

    def dtype(self, name: str, kind: str = MASTER) -> torch.dtype:
        """Return the dtype in which one kind of state of a parameter was saved."""
        parameter = self.parameters[name]
        file = self._first_file(parameter)
        return file.entries[file.holder(parameter.buffer, kind, parameter.elements.start)[0]].dtype

    def whole(self, name: str, kind: str = MASTER) -> Tensor:
        """Return all elements of a parameter, in its full shape."""
        shape = self.parameters[name].shape
        out = torch.empty(shape.numel(), dtype=self.dtype(name, kind) if shape.numel() else torch.float32)
        self.read(name, kind, range(shape.numel()), out=out)
        return out.view(shape)

    def read(self, name: str, kind: str, elements: range, *, out: Tensor, tensor: TensorRank = WHOLE) -> None:
        """Fill `out` with `elements` of the part of a parameter that belongs to a tensor rank.

        The elements are counted in row-major order within that part. `out` is one-dimensional, of any dtype and on any
        device. `tensor` need not be a rank of the layout that was saved.
        """
        parameter = self.parameters[name]
        if parameter.dim is None or tensor.size == self.tensor_size:
            self._read_part(parameter, kind, tensor.rank % self.tensor_size, elements, out)
            return
        # A row is all dims from the cut on: in a row of the whole parameter the ranks' parts follow one another.
        row = parameter.shape[parameter.dim :].numel()
        own_row, saved_row = row // tensor.size, row // self.tensor_size
        for first, num_rows, columns in _blocks(elements, own_row, max(1, BLOCK_NUMEL // saved_row)):
            block, out = out[: num_rows * len(columns)].view(num_rows, -1), out[num_rows * len(columns) :]
            start, stop = (tensor.rank * own_row + column for column in (columns.start, columns.stop))
            for part in range(start // saved_row, -(-stop // saved_row)):
                left, right = max(start, part * saved_row), min(stop, (part + 1) * saved_row)
                saved_columns = range(left - part * saved_row, right - part * saved_row)
                target = block[:, left - start : right - start]
                self._read_columns(parameter, kind, part, (first, num_rows, saved_columns, saved_row), target)

    def _read_columns(
        self, parameter: SavedParameter, kind: str, part: int, block: tuple[int, int, range, int], out: Tensor
    ) -> None:
        """Read some columns of some rows of a saved part; the elements between them are read too and dropped."""
        first, num_rows, columns, row = block
        elements = range(first * row + columns.start, (first + num_rows - 1) * row + columns.stop)
        if num_rows == 1:
            self._read_part(parameter, kind, part, elements, out[0])
            return
        found = out.new_empty(len(elements), device="cpu")
        self._read_part(parameter, kind, part, elements, found)
        out.copy_(found.as_strided((num_rows, len(columns)), (row, 1)))

    def _read_part(self, parameter: SavedParameter, kind: str, part: int, elements: range, out: Tensor) -> None:
        """Read elements of the part that belonged to one tensor rank of the saved layout."""
        start = parameter.elements.start
        in_buffer = range(start + elements.start, start + elements.stop)
        for shard, stretch in self._layouts[parameter.buffer].shards(in_buffer):
            file = self.file(shard * self.tensor_size + part)
            held, first = file.holder(parameter.buffer, kind, stretch.start)
            target = out[stretch.start - in_buffer.start : stretch.stop - in_buffer.start]
            file.read(held, range(stretch.start - first, stretch.stop - first), target)

    def _first_file(self, parameter: SavedParameter) -> SavedFile:
        """Return the file that contains the first element of a parameter."""
        start = parameter.elements.start
        shard, _ = next(self._layouts[parameter.buffer].shards(range(start, start + 1)))
        return self.file(shard * self.tensor_size)


def full_shapes(description: dict[str, Any]) -> dict[str, list[int]]:
    """Return the full shape of every parameter of a description.

    Two models with the same names and shapes can read each other's states.
    """
    layouts = [_layout(buffer) for buffer in description["buffers"]]
    found = _parameters(layouts, description["split_dims"], description["tensor_size"])
    return {name: list(parameter.shape) for name, parameter in found.items()}


def _parameters(layouts: list[Layout], dims: dict[str, int], tensor_size: int) -> dict[str, SavedParameter]:
    found = {}
    for number, layout in enumerate(layouts):
        for span in layout.spans:
            cut = dims.get(span.name)
            shape = torch.Size(n * tensor_size if dim == cut else n for dim, n in enumerate(span.shape))
            found[span.name] = SavedParameter(shape, cut, number, span.elements)
    return found


def _blocks(elements: range, row_numel: int, max_rows: int) -> Iterator[tuple[int, int, range]]:
    """Divide `elements` into blocks of whole rows, and the incomplete rows at both ends.

    Yields (first row, number of rows, columns). A block has at most `max_rows` rows.
    """
    start = elements.start
    while start < elements.stop:
        row, column = divmod(start, row_numel)
        num_whole = 0 if column else (elements.stop - start) // row_numel
        num_rows = max(1, min(num_whole, max_rows))
        columns = range(column, min(row_numel, column + elements.stop - start))
        yield row, num_rows, columns
        start += num_rows * len(columns)
