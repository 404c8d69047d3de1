"""Reads any elements of any parameter, of its weights or its optimizer state, from the files of a saved layout.

A rank of any layout reads the elements that it needs from the files of the layout that was saved. No file is converted,
and a rank holds only the elements that it reads.

    a parameter, cut along the tensor axis      | row 0 of rank 0 | row 0 of rank 1 | row 1 of rank 0 | ...
    the part of one tensor rank, flattened      | ... | span of the parameter | ... |    a range of one flat buffer
    the shards of that buffer                   | rank 0 | rank 1 | ... | rank 0 | ...   along the shard axis: `Layout`
    the file of a rank                          "3.exp_avg.640": elements of flat buffer 3, from its element 640 on
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel.errors import ConfigError
from zero.partition.layout import Layout
from zero.state.description import layout_of
from zero.state.schema import shown
from zero.state.tensor_file import OnRead, TensorFile

PER_BLOCK = re.compile(r".*_per_([1-9][0-9]{0,8})")  # a kind of state that has one value for so many elements
MASTER = "master"  # the kind of tensor that every parameter has: its master weights
PART_NAME = re.compile(r"(0|[1-9][0-9]{0,17})\.(\w+)\.(0|[1-9][0-9]{0,17})")  # "3.exp_avg.640"
MAX_OPEN_FILES = 32
BLOCK_NUMEL = 2**22  # elements that are read at once if only some columns of a parameter are needed


def elements_per_value(kind: str) -> int:
    """Return the number of consecutive elements of a parameter for which a kind of state has one value."""
    found = PER_BLOCK.fullmatch(kind)
    return int(found[1]) if found else 1


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of the file that a rank writes."""
    return folder / f"rank-{rank:05d}.safetensors"


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


@dataclass(frozen=True)
class SavedParameter:
    """A parameter, and the elements of a flat buffer that each tensor rank's part of it occupies."""

    shape: torch.Size  # of the whole parameter
    dim: int | None  # the dim that is cut along the tensor axis; None if every tensor rank has the whole parameter
    buffer: int  # the number of the flat buffer
    elements: range  # of the flat buffer; the same on all tensor ranks


class Block(NamedTuple):
    """Some columns of consecutive rows of a matrix."""

    first_row: int
    num_rows: int
    columns: range
    row_numel: int  # the number of all columns

    @property
    def elements(self) -> range:
        """The elements of the matrix from the first to the last of the block, in row-major order."""
        first, last = self.first_row * self.row_numel, (self.first_row + self.num_rows - 1) * self.row_numel
        return range(first + self.columns.start, last + self.columns.stop)


class SavedFile(TensorFile):
    """The file of one rank, with an index of the tensors in it by kind and by position in the flat buffers.

    Raises ConfigError if a tensor does not lie in its flat buffer, or cannot be a part of it.
    """

    def __init__(self, path: Path, layouts: Sequence[Layout], *on_read: OnRead):
        super().__init__(path, *on_read)
        starts: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for name, entry in self.entries.items():
            if not (found := PART_NAME.fullmatch(name)):
                continue
            number, kind, start = int(found[1]), found[2], int(found[3])
            stop = start + entry.shape.numel()
            if number >= len(layouts) or stop > layouts[number].numel or len(entry.shape) > 1:
                raise ConfigError(
                    f"{path} does not match layout.json: {shown(name)} of shape {list(entry.shape)} does not lie "
                    f"in one of {len(layouts)} flat buffers"
                )
            if kind == MASTER and not entry.shape:
                raise ConfigError(f"{path} does not match layout.json: {shown(name)} is a number, not weights")
            starts[number, kind].append(start)
        self._starts = {key: sorted(found) for key, found in starts.items()}

    def kinds_at(self, buffer: int, start: int) -> list[str]:
        """Return the kinds of the tensors that begin at element `start` of a flat buffer."""
        kinds = [kind for number, kind in self._starts if number == buffer]
        return [kind for kind in kinds if f"{buffer}.{kind}.{start}" in self.entries]

    def find_tensor(self, buffer: int, kind: str, element: int) -> tuple[str, int]:
        """Return the name of the tensor that contains an element of a flat buffer, and the tensor's first element.

        Raises ConfigError if the file does not contain such a tensor.
        """
        starts = self._starts.get((buffer, kind), [])
        index = bisect_right(starts, element) - 1
        if index < 0:
            raise ConfigError(
                f"{self.path} does not match layout.json: it lacks values of {kind}; choose another checkpoint"
            )
        return f"{buffer}.{kind}.{starts[index]}", starts[index]


class SavedState:
    """A reader of the files that the ranks of one layout have written to `folder`.

    `description` is the result of `owned_state.describe_state` on those ranks; `on_read` is that of a `TensorFile`.
    """

    def __init__(self, folder: Path, description: dict[str, Any], *on_read: OnRead):
        self.folder = folder
        self.data_size, self.tensor_size = description["data_size"], description["tensor_size"]
        self._layouts = [layout_of(buffer) for buffer in description["buffers"]]
        self.parameters = saved_parameters(description)
        self.file = lru_cache(MAX_OPEN_FILES)(lambda rank: SavedFile(rank_file(folder, rank), self._layouts, *on_read))

    def state_kinds(self, name: str) -> list[str]:
        """Return the kinds of optimizer state of a parameter, such as exp_avg, exp_avg_sq and step."""
        parameter = self.parameters[name]
        if not parameter.elements:
            return []
        kinds = self._first_file(parameter).kinds_at(parameter.buffer, parameter.elements.start)
        return sorted(set(kinds) - {MASTER})

    def scalar(self, name: str, kind: str) -> Tensor | None:
        """Return optimizer state that is a number, such as a step counter, 0-dim; None if each element has a value."""
        parameter = self.parameters[name]
        file, tensor_name = self._first_file(parameter), f"{parameter.buffer}.{kind}.{parameter.elements.start}"
        return None if file.entries[tensor_name].shape else file.tensor(tensor_name)

    def dtype(self, name: str, kind: str = MASTER) -> torch.dtype:
        """Return the dtype in which one kind of tensor of a parameter was saved."""
        parameter = self.parameters[name]
        file = self._first_file(parameter)
        tensor_name, _ = file.find_tensor(parameter.buffer, kind, parameter.elements.start)
        return file.entries[tensor_name].dtype

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
        row_numel = parameter.shape[own_dim if parameter.dim is None else parameter.dim :].numel()
        own_numel, saved_numel = row_numel // num_parts, row_numel // num_saved_parts
        for block in _blocks(elements, own_numel, BLOCK_NUMEL // saved_numel):
            numel = block.num_rows * len(block.columns)
            block_out, out = out[:numel].view(block.num_rows, -1), out[numel:]
            part = 0 if own_dim is None else tensor.rank
            start, stop = (part * own_numel + column for column in (block.columns.start, block.columns.stop))
            for saved_rank in range(start // saved_numel, -(-stop // saved_numel)):
                saved_start = saved_rank * saved_numel
                left, right = max(start, saved_start), min(stop, saved_start + saved_numel)
                columns = range(left - saved_start, right - saved_start)
                saved_block = Block(block.first_row, block.num_rows, columns, saved_numel)
                self._read_block(parameter, kind, saved_rank, saved_block, block_out[:, left - start : right - start])

    def load_by_name(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors that one rank each has saved whole, under these names.

        Raises ConfigError if no file has one of them, or has it in another shape.
        """
        if not tensors:
            return
        ranks = {name: rank for rank in range(self.data_size * self.tensor_size) for name in self.file(rank).entries}
        for name, out in tensors.items():
            found = self.file(ranks[name]).entries[name].shape if name in ranks else None
            if found != out.shape:
                raise ConfigError(
                    f"{self.folder}: {shown(name)} is {'missing' if found is None else list(found)} there and "
                    f"{list(out.shape)} in this run; resume with the settings of the optimizer that it was saved with, "
                    "such as per_repetition (muon.per_head), row_beta or rank_fraction"
                )
            self.file(ranks[name]).load(name, out)

    def read_blocks(self, name: str, kind: str, elements: range, *, out: Tensor, tensor: TensorRank = WHOLE) -> None:
        """Fill `out` with the values of a kind that has one for each block of elements, if `has_blocks_of` is true.

        `elements` begin with a block.
        """
        numel = elements_per_value(kind)
        stored = self._stored(self.parameters[name], kind, tensor.rank % self.tensor_size, elements)
        for file, tensor_name, wanted, offset in stored:
            values = range(wanted.start // numel, -(-wanted.stop // numel))
            file.read(tensor_name, values, out[offset // numel : offset // numel + len(values)])

    def has_blocks_of(self, name: str, tensor: TensorRank) -> bool:
        """Return whether a parameter was cut along the tensor axis as it is now, so that its blocks are the same."""
        num_parts, num_saved_parts = self._num_parts(name, tensor)
        return num_parts == num_saved_parts

    def _num_parts(self, name: str, tensor: TensorRank) -> tuple[int, int]:
        """Return the numbers of parts into which the tensor axis cuts a parameter: now, and when it was saved."""
        num_saved_parts = 1 if self.parameters[name].dim is None else self.tensor_size
        return tensor.size if name in tensor.dims else 1, num_saved_parts

    def _read_block(self, parameter: SavedParameter, kind: str, saved_rank: int, block: Block, out: Tensor) -> None:
        """Read a block of the part of a saved tensor rank; columns between those of the block are read and dropped."""
        if block.num_rows == 1:
            self._read_part(parameter, kind, saved_rank, block.elements, out[0])
            return
        values = out.new_empty(len(block.elements), device="cpu")
        self._read_part(parameter, kind, saved_rank, block.elements, values)
        out.copy_(values.as_strided((block.num_rows, len(block.columns)), (block.row_numel, 1)))

    def _read_part(self, parameter: SavedParameter, kind: str, saved_rank: int, elements: range, out: Tensor) -> None:
        """Read elements of the part of a saved tensor rank, from the files of all ranks that own some of them."""
        numel = elements_per_value(kind)
        for file, tensor_name, wanted, offset in self._stored(parameter, kind, saved_rank, elements):
            target = out[offset : offset + len(wanted)]
            if numel == 1:
                file.read(tensor_name, wanted, target)
            else:
                blocks = range(wanted.start // numel, -(-wanted.stop // numel))
                values = out.new_empty(len(blocks), device="cpu")
                file.read(tensor_name, blocks, values)
                skipped = wanted.start % numel
                target.copy_(values.repeat_interleave(numel)[skipped : skipped + len(wanted)])

    def _stored(
        self, parameter: SavedParameter, kind: str, saved_rank: int, elements: range
    ) -> Iterator[tuple[SavedFile, str, range, int]]:
        """Yield (file, name of a tensor, its elements, the first one's index in `elements`) of each owner of some."""
        start = parameter.elements.start + elements.start
        in_buffer = range(start, parameter.elements.start + elements.stop)
        for shard_rank, owned in self._layouts[parameter.buffer].shards(in_buffer):
            file = self.file(shard_rank * self.tensor_size + saved_rank)
            tensor_name, first = file.find_tensor(parameter.buffer, kind, owned.start)
            yield file, tensor_name, range(owned.start - first, owned.stop - first), owned.start - start

    def _first_file(self, parameter: SavedParameter) -> SavedFile:
        """Return the file that contains the first element of a parameter."""
        start = parameter.elements.start
        shard_rank, _ = next(self._layouts[parameter.buffer].shards(range(start, start + 1)))
        return self.file(shard_rank * self.tensor_size)


def saved_parameters(description: dict[str, Any]) -> dict[str, SavedParameter]:
    """Return the parameters of a result of `describe_state`, by name."""
    parameters, tensor_size = {}, description["tensor_size"]
    for number, buffer in enumerate(description["buffers"]):
        for span in layout_of(buffer).spans:
            split_dim = description["split_dims"].get(span.name)
            shape = torch.Size(n * tensor_size if dim == split_dim else n for dim, n in enumerate(span.shape))
            parameters[span.name] = SavedParameter(shape, split_dim, number, span.elements)
    return parameters


def _blocks(elements: range, row_numel: int, max_rows: int) -> Iterator[Block]:
    """Divide `elements` of a matrix into blocks of at most `max_rows` whole rows, or of one, and incomplete rows."""
    start = elements.start
    while start < elements.stop:
        row, column = divmod(start, row_numel)
        num_whole = 0 if column else (elements.stop - start) // row_numel
        num_rows = max(1, min(num_whole, max_rows))
        columns = range(column, min(row_numel, column + elements.stop - start))
        yield Block(row, num_rows, columns, row_numel)
        start += num_rows * len(columns)
