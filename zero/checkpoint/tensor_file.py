"""Writes and reads files of tensors in the safetensors format, with a checksum, one chunk of host memory at a time.

    8 bytes: length of the header | {"__metadata__": {"crc32": ...}, name: type, shape, offsets, ...} | data

The safetensors package can read these files, and `TensorFile` can read files of the package. The package itself is not
used, for three reasons. To write, it needs all tensors in host memory at the same time. To read, it maps the file into
memory, and the mapped pages count as memory of the process: to read 1 GiB in ranges of 4 MiB, it needs 1,033 MiB in the
time in which `TensorFile` needs 8 MiB. And its slices count rows: a slice cannot return elements 4 to 12 of a (3, 5)
tensor.
"""

import ctypes
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from parallel.validation.errors import ConfigError
from zero.checkpoint.schema import COUNT, Schema, check, parse_json, shown
from zero.checkpoint.sealed_file import (
    CHUNK_BYTES,
    NO_CHECKSUM,
    Seal,
    begin_write_back,
    checksum_digits,
    checksum_offset,
    flush,
    reserve,
)

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
HEADER: Schema = {str: {"dtype": set(DTYPES), "shape": [COUNT], "data_offsets": (COUNT, COUNT)}}
METADATA = "__metadata__"
MAX_DIMS = 64
LENGTH_BYTES = 8  # at the beginning of a file: the bytes of its header
OnRead = Callable[[Path, int, int], None]


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    on_chunk: Callable[[], None] = lambda: None,
) -> Seal:
    """Write tensors from any device to one file, flush it to the disk, and return its seal.

    Raises OSError if that fails, before anything is written if the disk has no room for it, and ConfigError if the
    format has no such type as that of a tensor. A chunk is hashed and written at the same time.
    `on_chunk` is called after each chunk of at most `CHUNK_BYTES`.
    """
    # The tensors with the largest elements are first, so that every tensor is aligned.
    by_alignment = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header = _header(by_alignment, {"crc32": NO_CHECKSUM, **(metadata or {})})
    num_bytes = len(header) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with path.open("wb") as file, ThreadPoolExecutor(1) as hasher:
        reserve(file, num_bytes)
        file.write(header)
        hashed = hasher.submit(zlib.crc32, header)
        for tensor in by_alignment.values():
            for chunk in _chunks(tensor):
                # When the chunk before it is hashed: so no more than two are in memory.
                hashed = hasher.submit(zlib.crc32, chunk, hashed.result())
                file.write(chunk)
                begin_write_back(file, len(chunk))
                on_chunk()
        checksum = hashed.result()
        # Last: the checksum, which is in the header, also covers everything after the header.
        file.seek(checksum_offset(header))
        file.write(checksum_digits(checksum))
        flush(file)
    return Seal(checksum_digits(checksum).decode(), num_bytes)


@dataclass(frozen=True)
class TensorEntry:
    """The description of a tensor in a file."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int  # of its first byte in the file


def no_one_hears(_path: Path, _offset: int, _num_bytes: int) -> None:
    """Ignore what is read."""


class TensorFile:
    """A reader of any range of any tensor of a safetensors file.

    The types, shapes and offsets of all tensors are compared with the size of the file. `on_read` hears of (file,
    offset, bytes) before each read, also of the header, which is read once. `opened` returns the file of a path; it
    may close the least recently used ones. Raises ConfigError if the file cannot be read, or is not a safetensors file.
    """

    def __init__(
        self,
        path: Path,
        on_read: OnRead = no_one_hears,
        opened: Callable[[Path], BinaryIO] | None = None,
    ):
        self.path, self._on_read, self._opened = path, on_read, opened or cache(open_unbuffered)
        on_read(path, 0, LENGTH_BYTES)
        try:
            self.entries, self.metadata = _read_header(self._opened(path), path, on_read)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error

    def entry(self, name: str) -> TensorEntry:
        """Return the description of a tensor. Raises ConfigError if the file does not contain it."""
        if name not in self.entries:
            raise ConfigError(f"{self.path} is damaged: it has no tensor {shown(name)}")
        return self.entries[name]

    def tensor(self, name: str) -> Tensor:
        """Return all of a tensor, in host memory."""
        entry = self.entry(name)
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, range(out.numel()), out.view(-1))
        return out

    def load(self, name: str, out: Tensor) -> None:
        """Copy all of a tensor to `out`. Raises ConfigError if the shapes differ, or only one of them is of floats."""
        found = self.tensor(name)
        if found.shape != out.shape or not _are_alike(found.dtype, out.dtype):
            raise ConfigError(
                f"{self.path} is damaged: {shown(name)} is {found.dtype} of shape {list(found.shape)}, {out.dtype} of "
                f"shape {list(out.shape)} is needed"
            )
        out.copy_(found)

    def load_present(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of the file that have one of these names."""
        for name in tensors.keys() & self.entries.keys():
            self.load(name, tensors[name])

    def read(self, name: str, elements: range, out: Tensor) -> None:
        """Fill `out` with `elements` of the tensor `name`, counted in row-major order.

        `out` is one-dimensional and contiguous, of any dtype and on any device. Raises ConfigError if the tensor has
        fewer elements, if only one of both is of floats, or if the file is too short.
        """
        entry, out = self.entry(name), out.detach()
        if not _are_alike(entry.dtype, out.dtype):
            raise ConfigError(f"{self.path} is damaged: {shown(name)} is {entry.dtype}, {out.dtype} is needed")
        if elements.stop > math.prod(entry.shape):
            raise ConfigError(f"{self.path}: {name} has {math.prod(entry.shape)} elements, {elements.stop} are needed")
        file = self._opened(self.path)
        file.seek(entry.offset + elements.start * entry.dtype.itemsize)
        if out.dtype == entry.dtype and not out.is_cuda:
            self._fill(file, out)
            return
        chunk = torch.empty(min(len(out), CHUNK_BYTES // entry.dtype.itemsize), dtype=entry.dtype)
        for part in out.split(max(1, len(chunk))):
            self._fill(file, chunk[: len(part)])
            part.copy_(chunk[: len(part)])

    def _fill(self, file: BinaryIO, out: Tensor) -> None:
        """Read the file from its current position into the memory of `out`."""
        left = _memory_of(out)
        self._on_read(self.path, file.tell(), len(left))
        while len(left):
            num_read = file.readinto(left)  # type: ignore[attr-defined]
            if not num_read:
                raise ConfigError(f"{self.path} is damaged: it is {len(left)} bytes too short")
            left = left[num_read:]


def open_unbuffered(path: Path) -> BinaryIO:
    """Open a file of which ranges are read."""
    return path.open("rb", buffering=0)


def _are_alike(saved: torch.dtype, present: torch.dtype) -> bool:
    """Return whether values of one type may be cast to the other: codes that were quantized are no floats."""
    return saved.is_floating_point == present.is_floating_point and saved.is_complex == present.is_complex


def _read_header(file: BinaryIO, path: Path, on_read: OnRead) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of an open file and its metadata. Raises ConfigError unless the tensors fill the file."""
    file_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    data_offset = LENGTH_BYTES + header_bytes
    if not LENGTH_BYTES < data_offset <= file_bytes:
        raise ConfigError(f"{path} is damaged: its header would have {header_bytes} of its {file_bytes} bytes")
    on_read(path, LENGTH_BYTES, header_bytes)
    header = parse_json(file.read(header_bytes), {str: dict}, path)
    metadata = header.pop(METADATA, {})
    check(metadata, {str: str}, path)
    check(header, HEADER, path)
    entries, stop = {}, 0
    for name, found in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (start, next_start), shape = found["data_offsets"], found["shape"]
        # Beside a 0, a shape may have any other numbers; torch multiplies them.
        if len(shape) > MAX_DIMS or (0 in shape and math.prod(n for n in shape if n) * 8 not in COUNT):
            raise ConfigError(f"{path} is damaged: {shown(name)} has the shape {shown(shape)}")
        num_bytes = DTYPES[found["dtype"]].itemsize * math.prod(shape)
        if start != stop or next_start - start != num_bytes:
            raise ConfigError(
                f"{path} is damaged: {shown(name)} has the offsets {start} and {next_start}, and its {num_bytes} bytes "
                f"begin at {stop}"
            )
        entries[name] = TensorEntry(DTYPES[found["dtype"]], torch.Size(shape), data_offset + start)
        stop = next_start
    if data_offset + stop != file_bytes:
        raise ConfigError(f"{path} is damaged: it has {file_bytes} bytes, its tensors end at {data_offset + stop}")
    return entries, metadata


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {METADATA: metadata}
    start = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(f"{name} is {tensor.dtype}, which a safetensors file cannot hold; convert it")
        stop = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    for part in tensor.detach().reshape(-1).split(CHUNK_BYTES // tensor.element_size()):
        yield _memory_of(part.cpu().contiguous())


def _memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host. A storage that NumPy has viewed could not be resized."""
    if not tensor.numel():
        return memoryview(b"")  # there is no memory, and a checksum starts again at a null pointer
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # allocated as long as the view, which refers to the array
    return memoryview(array)
