"""One rank's tensors in one safetensors file, with its checksum, written and read through one chunk of host memory.

    8 bytes: length of the header | {"__metadata__": {"crc32": ...}, name: type, shape, offsets, ...} | data

Written and read here rather than by the safetensors package, which wants all tensors in host memory, or maps the file
into it. Either reads what the other writes.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.errors import ConfigError
from zero.state.sealed_file import CHUNK_BYTES, NO_CHECKSUM, digits, flush, place_of_checksum

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    on_chunk: Callable[[], None] = lambda: None,
) -> None:
    """From any device; on the disk when this returns. Raises OSError."""
    by_alignment = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header = _header(by_alignment, {"crc32": NO_CHECKSUM, **(metadata or {})})
    with path.open("wb") as file:
        file.write(header)
        checksum = zlib.crc32(header)
        for tensor in by_alignment.values():
            for chunk in _chunks(tensor):
                file.write(chunk)
                checksum = zlib.crc32(chunk, checksum)
                on_chunk()
        file.seek(place_of_checksum(header))
        file.write(digits(checksum))
        flush(file)


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; `place` is that of its first byte."""

    dtype: torch.dtype
    shape: torch.Size
    place: int


class TensorFile:
    """Reads such a file, any stretch of any tensor. Raises ConfigError where it is missing or no such file."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
            header_bytes = int.from_bytes(self._file.read(8), "little")
            header = json.loads(self._file.read(min(header_bytes, path.stat().st_size)))
            header.pop("__metadata__", None)
            self.entries = {name: _entry(found, 8 + header_bytes) for name, found in header.items()}
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged: it is no safetensors file") from error

    def tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, range(out.numel()), out.view(-1))
        return out

    def read(self, name: str, elements: range, out: Tensor) -> None:
        """Fill `out` (flat, contiguous, any type and device) with `elements` of a tensor, counted flat."""
        entry, out = self.entries[name], out.detach()
        if elements.stop > math.prod(entry.shape):
            raise ConfigError(f"{self.path}: {name} has {math.prod(entry.shape)} elements, {elements.stop} are needed")
        self._file.seek(entry.place + elements.start * entry.dtype.itemsize)
        if out.dtype == entry.dtype and not out.is_cuda:
            self._fill(out)
            return
        chunk = torch.empty(min(len(out), CHUNK_BYTES // entry.dtype.itemsize), dtype=entry.dtype)
        for part in out.split(max(1, len(chunk))):
            self._fill(chunk[: len(part)])
            part.copy_(chunk[: len(part)])

    def _fill(self, out: Tensor) -> None:
        left = out.view(torch.uint8).numpy().data
        while len(left):
            num_read = self._file.readinto(left)
            if not num_read:
                raise ConfigError(f"{self.path} is damaged: it ends {len(left)} bytes too early")
            left = left[num_read:]


def _entry(found: Mapping[str, Any], data_place: int) -> Entry:
    return Entry(DTYPES[found["dtype"]], torch.Size(found["shape"]), data_place + found["data_offsets"][0])


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    for part in tensor.detach().reshape(-1).split(CHUNK_BYTES // tensor.element_size()):
        yield part.cpu().contiguous().view(torch.uint8).numpy().data
