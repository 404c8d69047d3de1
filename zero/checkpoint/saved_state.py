"""Reads any elements of any parameter, of its weights or its optimizer state, from the files of a saved layout.

A rank of any layout reads the elements that it needs from the files of the layout that was saved. No file is converted,
and a rank holds only the elements that it reads.

    a parameter, cut along the tensor axis      | row 0 of rank 0 | row 0 of rank 1 | row 1 of rank 0 | ...
    the part of one tensor rank, flattened      | ... | span of the parameter | ... |    a range of one flat buffer
    the shards of that buffer                   | rank 0 | rank 1 | ... | rank 0 | ...   along the shard axis: `Layout`
    the file of a rank                          "3.exp_avg.640": elements of flat buffer 3, from its element 640 on
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel.validation.errors import ConfigError
from zero.checkpoint.layout_file import layout_of, rank_file
from zero.checkpoint.schema import shown
from zero.checkpoint.tensor_file import OnRead, TensorFile, no_one_hears, open_unbuffered
from zero.core.partition.layout import rectangles

PER_BLOCK = re.compile(r".*_per_([1-9][0-9]{0,8})")  # a kind of state that has one value for so many elements
MASTER = "master"  # the kind of tensor that every parameter has: its master weights
PART_NAME = re.compile(r"(0|[1-9][0-9]{0,17})\.(\w+)\.(0|[1-9][0-9]{0,17})")  # "3.exp_avg.640"
MAX_OPEN_FILES = 512  # at a time; what their headers say is kept of all
BLOCK_NUMEL = 2**22  # elements that are read at once if only some columns of a parameter are needed


def elements_per_value(kind: str) -> int:
    """Return the number of consecutive elements of a parameter for which a kind of state has one value."""
    found = PER_BLOCK.fullmatch(kind)
    return int(found[1]) if found else 1


@dataclass(frozen=True)
class TensorRank:
    """A position along a tensor axis, which determines a part of each parameter. Rank 0 of 1 has whole parameters.

    `dims` are the dims along which the axis cuts parameters, by name. A parameter may be cut along an axis of one size
    and whole along one of another size.
    """

    rank: int = 0
    size: int = 1
    dims: Mapping[str, int] = field(default_factory=dict)


WHOLE = TensorRank()


class SavedParameter(NamedTuple):
    """A parameter, and the elements of a flat buffer that each tensor rank's part of it occupies."""

    shape: torch.Size  # of the whole parameter
    dim: int | None  # the dim that is cut along the tensor axis; None if every tensor rank has the whole parameter
    buffer: int  # the number of the flat buffer
    elements: range  # of the flat buffer; the same on all tensor ranks


class Columns(NamedTuple):
    """Some columns of consecutive rows of a matrix."""

    rows: range
    columns: range
    row_numel: int  # the number of all columns

    @property
    def elements(self) -> range:
        """The elements of the matrix from the first to the last of these, in row-major order."""
        first, last = self.rows.start * self.row_numel, (self.rows.stop - 1) * self.row_numel
        return range(first + self.columns.start, last + self.columns.stop)


class Stored(NamedTuple):
    """Some elements of a tensor in a file, and the place of the first one among those that are read."""

    file: TensorFile
    name: str
    elements: range
    offset: int


class SavedState:
    """A reader of the files that the ranks of one layout have written to `folder`.

    `description` is that of `RankState.describe` on those ranks; `on_read` is that of a `TensorFile`.
    """

    def __init__(self, folder: Path, description: dict[str, Any], on_read: OnRead = no_one_hears):
        self.folder = folder
        self.data_size, self.tensor_size = description["data_size"], description["tensor_size"]
        self._layouts = [layout_of(buffer) for buffer in description["buffers"]]
        self.parameters = saved_parameters(description)
        opened = lru_cache(MAX_OPEN_FILES)(open_unbuffered)
        self.file = cache(lambda rank: TensorFile(rank_file(folder, rank), on_read, opened))
        self._kinds: dict[Path, list[str]] = {}

    def state_kinds(self, name: str) -> list[str]:
        """Return the kinds of optimizer state of a parameter, such as exp_avg, exp_avg_sq and step."""
        parameter = self.parameters[name]
        if not parameter.elements:
            return []
        file = self._first(parameter, MASTER).file
        if file.path not in self._kinds:
            self._kinds[file.path] = _kinds_in(file)
        kinds = self._kinds[file.path]
        names = {kind: f"{parameter.buffer}.{kind}.{parameter.elements.start}" for kind in kinds}
        return [kind for kind, found in names.items() if found in file.entries]

    def scalar(self, name: str, kind: str) -> Tensor | None:
        """Return optimizer state that is a number, such as a step counter, 0-dim; None if each element has a value."""
        first = self._first(self.parameters[name], kind)
        return None if first.file.entry(first.name).shape else first.file.tensor(first.name)

    def dtype(self, name: str, kind: str = MASTER) -> torch.dtype:
        """Return the dtype in which one kind of tensor of a parameter was saved."""
        first = self._first(self.parameters[name], kind)
        return first.file.entry(first.name).dtype

    def whole(self, name: str, kind: str = MASTER, dtype: torch.dtype | None = None) -> Tensor:
        """Return all elements of a parameter, in its full shape, in `dtype` or the one that was saved."""
        shape = self.parameters[name].shape
        saved = self.dtype(name, kind) if shape.numel() else torch.float32
        out = torch.empty(shape.numel(), dtype=dtype or saved)
        self.read(name, kind, range(shape.numel()), out=out)
        return out.view(shape)

    def read(self, name: str, kind: str, elements: range, *, out: Tensor, tensor: TensorRank = WHOLE) -> None:
        """Fill `out` with `elements` of the part of a parameter that belongs to the tensor rank `tensor`.

        The elements are counted in row-major order within that part. `out` is one-dimensional, of any dtype and on any
        device. The size of the tensor axis may differ from the size that was saved. A value that is that of a block of
        elements is repeated for each of them.
        """
        parameter, own_dim = self.parameters[name], tensor.dims.get(name)
        num_parts, num_saved_parts = self._num_parts(name, tensor)
        if num_parts == num_saved_parts:
            self._read_part(parameter, kind, tensor.rank % self.tensor_size, elements, out)
            return
        # The parameter as a matrix: a row consists of all dims from the cut one on, so a rank's part is some columns.
        dim = own_dim if parameter.dim is None else parameter.dim
        num_rows, row_numel = parameter.shape[:dim].numel(), parameter.shape[dim:].numel()
        own_numel, saved_numel = row_numel // num_parts, row_numel // num_saved_parts
        own_start = 0 if own_dim is None else tensor.rank * own_numel
        for (first_row, column), (count, width) in rectangles((num_rows, own_numel), elements):
            start, stop = own_start + column, own_start + column + width
            for rows in _in_blocks(range(first_row, first_row + count), max(1, BLOCK_NUMEL // saved_numel)):
                block, out = out[: len(rows) * width].view(len(rows), width), out[len(rows) * width :]
                for saved_rank in range(start // saved_numel, -(-stop // saved_numel)):
                    saved_start = saved_rank * saved_numel
                    left, right = max(start, saved_start), min(stop, saved_start + saved_numel)
                    columns = Columns(rows, range(left - saved_start, right - saved_start), saved_numel)
                    self._read_columns(parameter, kind, saved_rank, columns, block[:, left - start : right - start])

    def load_by_name(self, tensors: Mapping[str, Tensor], shard_rank: int, tensor_rank: int) -> None:
        """Fill tensors that one rank each has saved whole, under these names.

        The file of the rank at these coordinates, which has all of them if the layout is the same, is looked at first.
        Raises ConfigError if no file has one of them, or has it in another shape.
        """
        # Replicas of these ranks have saved none.
        num_owners = max(layout.buckets[0].num_shards * layout.buckets[0].num_parts for layout in self._layouts)
        first, num_files = shard_rank * self.tensor_size + tensor_rank, num_owners * self.tensor_size
        ranks: dict[str, int] = {}
        for rank in (number % num_files for number in range(first, first + num_files)):
            if len(ranks) == len(tensors):
                break
            ranks |= dict.fromkeys(tensors.keys() & self.file(rank).entries.keys(), rank)
        for name, out in tensors.items():
            found = self.file(ranks[name]).entries[name].shape if name in ranks else None
            if found != out.shape:
                raise ConfigError(
                    f"{self.folder}: {shown(name)} is {'missing' if found is None else list(found)} there and "
                    f"{list(out.shape)} in this run; resume with the settings of the optimizer that it was saved with, "
                    "such as Muon.per_repetition or Muon.row_beta, and with the tensor size, if tensor ranks do not "
                    "divide the matrix"
                )
            self.file(ranks[name]).load(name, out)

    def read_blocks(self, name: str, kind: str, elements: range, *, out: Tensor, tensor: TensorRank = WHOLE) -> None:
        """Fill `out` with the values of a kind that has one for each block of elements, if `has_blocks_of` is true.

        `elements` begin with a block.
        """
        numel = elements_per_value(kind)
        for stored in self._stored(self.parameters[name], kind, tensor.rank % self.tensor_size, elements):
            values, first = _values_of(stored.elements, numel), stored.offset // numel
            stored.file.read(stored.name, values, out[first : first + len(values)])

    def has_blocks_of(self, name: str, tensor: TensorRank) -> bool:
        """Return whether a parameter was cut along the tensor axis as it is now, so that its blocks are the same."""
        num_parts, num_saved_parts = self._num_parts(name, tensor)
        return num_parts == num_saved_parts

    def _num_parts(self, name: str, tensor: TensorRank) -> tuple[int, int]:
        """Return the numbers of parts into which the tensor axis cuts a parameter: now, and when it was saved."""
        num_saved_parts = 1 if self.parameters[name].dim is None else self.tensor_size
        return tensor.size if name in tensor.dims else 1, num_saved_parts

    def _read_columns(
        self, parameter: SavedParameter, kind: str, saved_rank: int, columns: Columns, out: Tensor
    ) -> None:
        """Read columns of the part of a saved tensor rank; those between them are read too, and dropped."""
        if len(columns.rows) == 1:
            self._read_part(parameter, kind, saved_rank, columns.elements, out[0])
            return
        values = out.new_empty(len(columns.elements), device="cpu")
        self._read_part(parameter, kind, saved_rank, columns.elements, values)
        out.copy_(values.as_strided(out.shape, (columns.row_numel, 1)))

    def _read_part(self, parameter: SavedParameter, kind: str, saved_rank: int, elements: range, out: Tensor) -> None:
        """Read elements of the part of a saved tensor rank, from the files of all ranks that own some of them."""
        numel = elements_per_value(kind)
        for stored in self._stored(parameter, kind, saved_rank, elements):
            target = out[stored.offset : stored.offset + len(stored.elements)]
            if numel == 1:
                stored.file.read(stored.name, stored.elements, target)
            else:
                blocks = _values_of(stored.elements, numel)
                values = out.new_empty(len(blocks), device="cpu")
                stored.file.read(stored.name, blocks, values)
                target.copy_(values.repeat_interleave(numel)[stored.elements.start % numel :][: len(target)])

    def _stored(self, parameter: SavedParameter, kind: str, saved_rank: int, elements: range) -> Iterator[Stored]:
        """Yield where the elements of the part of a saved tensor rank are stored, in their order."""
        layout, start = self._layouts[parameter.buffer], parameter.elements.start + elements.start
        for shard_rank, owned in layout.shards(range(start, parameter.elements.start + elements.stop)):
            shard = layout.buckets[owned.start // len(layout.buckets[0].elements)].ranges(shard_rank).own
            # The master weights of a shard are one tensor, named by the first element of the shard. Other states have a
            # tensor for each piece of a parameter, named by the first element of the piece.
            first = shard.start if kind == MASTER else max(shard.start, parameter.elements.start)
            # The first replica has saved the shards, and it has the first ranks of the data axis: so the number of a
            # shard is that of a data rank.
            file = self.file(shard_rank * self.tensor_size + saved_rank)
            in_tensor = range(owned.start - first, owned.stop - first)
            yield Stored(file, f"{parameter.buffer}.{kind}.{first}", in_tensor, owned.start - start)

    def _first(self, parameter: SavedParameter, kind: str) -> Stored:
        """Return where the first element of a parameter is stored."""
        return next(self._stored(parameter, kind, 0, range(1)))


def saved_parameters(description: dict[str, Any]) -> dict[str, SavedParameter]:
    """Return the parameters of a description of a state, by name."""
    parameters, tensor_size = {}, description["tensor_size"]
    for number, buffer in enumerate(description["buffers"]):
        for span in layout_of(buffer).spans:
            split_dim = description["split_dims"].get(span.name)
            shape = torch.Size(n * tensor_size if dim == split_dim else n for dim, n in enumerate(span.shape))
            parameters[span.name] = SavedParameter(shape, split_dim, number, span.elements)
    return parameters


def _kinds_in(file: TensorFile) -> list[str]:
    """Return the kinds of optimizer state of which a file has parts."""
    return sorted({found[2] for found in map(PART_NAME.fullmatch, file.entries) if found} - {MASTER})


def _values_of(elements: range, numel: int) -> range:
    """Return the values that elements have, if there is one for every `numel` of them."""
    return range(elements.start // numel, -(-elements.stop // numel))


def _in_blocks(rows: range, size: int) -> Iterator[range]:
    return (rows[first : first + size] for first in range(0, len(rows), size))
