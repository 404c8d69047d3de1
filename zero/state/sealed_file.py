"""Files that contain their own checksum, and files that are complete even after a crash.

    tensors    8 bytes: length of the header | {"__metadata__":{"crc32":"89abcdef", ...}, ...} | data (tensor_file.py)
    JSON       {"crc32": "89abcdef", ...}

The eight digits are the CRC-32 of the whole file, computed with zeros in their place.
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
    """Write `content` and its checksum to a file, which is on the disk when this returns. Raise OSError."""
    text = json.dumps({"crc32": NO_CHECKSUM, **content}, indent=1).encode()
    start = checksum_offset(text)
    with path.open("wb") as file:
        file.write(text[:start] + checksum_digits(zlib.crc32(text)) + text[start + len(NO_CHECKSUM) :])
        flush(file)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file, with its checksum. Raise ConfigError if it differs from what was written."""
    verify(path)
    return json.loads(path.read_bytes())


def verify(path: Path) -> None:
    """Read the whole file. Raise ConfigError if it is missing, or differs from what was written."""
    checksum, expected = 0, None
    buffer = bytearray(CHUNK_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while num_bytes := file.readinto(buffer):
                if expected is None:  # the first chunk contains the checksum, near its beginning
                    found = CHECKSUM.search(buffer, 0, num_bytes)
                    if found is None:
                        raise ConfigError(f"{path} is damaged: it has no checksum")
                    expected, start = bytes(found[1]), found.start(1)
                    buffer[start : start + len(NO_CHECKSUM)] = NO_CHECKSUM.encode()
                checksum = zlib.crc32(memoryview(buffer)[:num_bytes], checksum)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if expected is None or checksum_digits(checksum) != expected:
        raise ConfigError(f"{path} is damaged: its {path.stat().st_size} bytes are not those that were written")


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader, also after a crash, finds the old text or the new one. Raise OSError."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(text.encode())
        flush(file)
    # Only now is the new text on the disk, so a crash after the renaming cannot leave an incomplete file.
    partial.replace(path)
    flush_folder(path.parent)


def flush(file: BinaryIO) -> None:
    """Write all that the system still buffers of `file` to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Write the names in `folder` to the disk: a renaming survives a crash only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum_offset(content: bytes) -> int:
    """Return the index of the first digit of the checksum."""
    found = CHECKSUM.search(content)
    assert found is not None
    return found.start(1)


def checksum_digits(checksum: int) -> bytes:
    """Return a CRC-32 as eight hexadecimal digits."""
    return f"{checksum:08x}".encode()
