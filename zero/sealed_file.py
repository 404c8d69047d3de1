"""Files that carry their own checksum: tensors as safetensors, and JSON.

    tensors    8 bytes: length of the header | {"__metadata__":{"crc32":"89abcdef", ...}, names, shapes, ...} | data
    JSON       {"crc32": "89abcdef", ...}

The eight digits are the CRC-32 of the whole file with zeros in their place. Written here rather than by the safetensors
package, which would hold all tensors in host memory at once; what is written, it reads.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from parallel.errors import ConfigError

CHUNK_BYTES = 2**24
NO_CHECKSUM = "0" * 8
CHECKSUM = re.compile(rb'"crc32": ?"([0-9a-f]{8})"')
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


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    on_chunk: Callable[[], None] = lambda: None,
) -> None:
    """From any device, through one chunk of host memory; on the disk when this returns. Raises OSError."""
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
        file.seek(_place_of_checksum(header))
        file.write(_digits(checksum))
        flush(file)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`content` and its checksum; on the disk when this returns. Raises OSError."""
    text = json.dumps({"crc32": NO_CHECKSUM, **content}, indent=1).encode()
    place = _place_of_checksum(text)
    with path.open("wb") as file:
        file.write(text[:place] + _digits(zlib.crc32(text)) + text[place + len(NO_CHECKSUM) :])
        flush(file)


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError where the file is not as it was written."""
    verify(path)
    return json.loads(path.read_bytes())


def verify(path: Path) -> None:
    """Read the whole file. Raises ConfigError where it is missing, or not as it was written."""
    checksum, expected = 0, None
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                if expected is None:  # the checksum is near the beginning
                    found = CHECKSUM.search(chunk[:CHUNK_BYTES])
                    if found is None:
                        raise ConfigError(f"{path} is damaged: it has no checksum")
                    expected = found[1]
                    chunk = chunk[: found.start(1)] + NO_CHECKSUM.encode() + chunk[found.end(1) :]
                checksum = zlib.crc32(chunk, checksum)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if expected is None or _digits(checksum) != expected:
        raise ConfigError(f"{path} is damaged: its {path.stat().st_size} bytes are not those that were written")


def replace_text(path: Path, text: str) -> None:
    """So that a reader, or a crash, sees the old text or the new one. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(text.encode())
        flush(file)
    partial.replace(path)
    flush_folder(path.parent)


def flush(file: BinaryIO) -> None:
    """Onto the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """The names in it, onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        yield memoryview(part.cpu().contiguous().view(torch.uint8).numpy())


def _place_of_checksum(content: bytes) -> int:
    found = CHECKSUM.search(content)
    assert found is not None
    return found.start(1)


def _digits(checksum: int) -> bytes:
    return f"{checksum:08x}".encode()
