"""Files that carry their own checksum, and files that a crash leaves whole.

    tensors    8 bytes: length of the header | {"__metadata__":{"crc32":"89abcdef", ...}, ...} | data (tensor_file.py)
    JSON       {"crc32": "89abcdef", ...}

The eight digits are the CRC-32 of the whole file with zeros in their place.
"""

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from parallel.errors import ConfigError

CHUNK_BYTES = 2**24
NO_CHECKSUM = "0" * 8
CHECKSUM = re.compile(rb'"crc32": ?"([0-9a-f]{8})"')


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`content` and its checksum; on the disk when this returns. Raises OSError."""
    text = json.dumps({"crc32": NO_CHECKSUM, **content}, indent=1).encode()
    place = place_of_checksum(text)
    with path.open("wb") as file:
        file.write(text[:place] + digits(zlib.crc32(text)) + text[place + len(NO_CHECKSUM) :])
        flush(file)


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError where the file is not as it was written."""
    verify(path)
    return json.loads(path.read_bytes())


def verify(path: Path) -> None:
    """Read the whole file. Raises ConfigError where it is missing, or not as it was written."""
    checksum, expected = 0, None
    buffer = bytearray(CHUNK_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while num_bytes := file.readinto(buffer):
                if expected is None:  # the checksum is near the beginning
                    found = CHECKSUM.search(buffer, 0, num_bytes)
                    if found is None:
                        raise ConfigError(f"{path} is damaged: it has no checksum")
                    expected, place = bytes(found[1]), found.start(1)
                    buffer[place : place + len(NO_CHECKSUM)] = NO_CHECKSUM.encode()
                checksum = zlib.crc32(memoryview(buffer)[:num_bytes], checksum)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if expected is None or digits(checksum) != expected:
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


def place_of_checksum(content: bytes) -> int:
    found = CHECKSUM.search(content)
    assert found is not None
    return found.start(1)


def digits(checksum: int) -> bytes:
    return f"{checksum:08x}".encode()
