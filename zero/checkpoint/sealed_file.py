"""Files that contain their own checksum, and files that are complete even after a crash.

    tensors    8 bytes: length of the header | {"__metadata__":{"crc32":"89abcdef", ...}, ...} | data (tensor_file.py)
    JSON       {"crc32": "89abcdef", ...}

The eight digits are the CRC-32 of the whole file, which is computed while the digits are zeros.
"""

import ctypes
import errno
import json
import os
import re
import zlib
from collections.abc import Callable
from ctypes import c_int64, get_errno
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from parallel.validation.errors import ConfigError
from parallel.validation.paths import remove
from zero.checkpoint.schema import Schema, parse_json

CHUNK_BYTES, MIN_WRITE_BACK_BYTES = 2**24, 2**20
VERIFIED_BYTES = 2**20  # that are read and hashed at once: they stay in a processor's cache
SYNC_FILE_RANGE_WRITE = 2  # in linux/fs.h
NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
NO_CHECKSUM = "0" * 8
CHECKSUM = re.compile(rb'"crc32": ?"([0-9a-f]{8})"')


_LIBC = ctypes.CDLL(None, use_errno=True)


class DamageError(ConfigError):
    """An error raised if a file cannot be read, or is not as it was written."""


class Seal(NamedTuple):
    """The checksum that a file contains, and its size: another file of the same name has another seal."""

    checksum: str  # eight hexadecimal digits
    num_bytes: int


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` with a checksum to a file, and flush it to the disk. Raises OSError if that fails."""
    text = json.dumps({"crc32": NO_CHECKSUM, **content}, indent=1).encode()
    start = checksum_offset(text)
    with path.open("wb") as file:
        file.write(text[:start] + checksum_digits(zlib.crc32(text)) + text[start + len(NO_CHECKSUM) :])
        flush(file)


def read_json(path: Path, schema: Schema) -> dict[str, Any]:
    """Return the content of a JSON file, including its checksum.

    Raises DamageError as `verify` does, and ConfigError if the content does not fit the schema.
    """
    verify(path)
    return parse_json(path.read_bytes(), schema, path)


def verify(path: Path, on_chunk: Callable[[], None] = lambda: None) -> Seal:
    """Read a file, compare its checksum, and return its seal; `on_chunk` is called for each chunk.

    Raises DamageError if it cannot be read, or is not as it was written.
    """
    checksum, total_bytes, expected = 0, 0, None
    buffer = bytearray(VERIFIED_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while num_bytes := file.readinto(buffer):
                if expected is None:  # the first chunk contains the checksum, near its beginning
                    found = CHECKSUM.search(buffer, 0, num_bytes)
                    if found is None:
                        raise DamageError(f"{path} is damaged: it has no checksum")
                    expected, start = bytes(found[1]), found.start(1)
                    buffer[start : start + len(NO_CHECKSUM)] = NO_CHECKSUM.encode()
                checksum = zlib.crc32(memoryview(buffer)[:num_bytes], checksum)
                total_bytes += num_bytes
                on_chunk()
    except OSError as error:
        raise DamageError(f"{path} cannot be read: {error.strerror}") from error
    if expected is None or checksum_digits(checksum) != expected:
        raise DamageError(f"{path} is damaged: its {total_bytes} bytes are not those that were written")
    return Seal(expected.decode(), total_bytes)


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader finds the old text or the new one, even after a crash.

    Raises OSError if the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    remove(partial)
    with partial.open("xb") as file:
        file.write(text.encode())
        flush(file)
    # Rename only after the new text is on the disk: a crash can then not leave an incomplete file.
    partial.replace(path)
    flush_folder(path.parent)


def reserve(file: BinaryIO, num_bytes: int) -> None:
    """Take room on the disk for an empty file, if the file system can. Raises OSError if there is too little."""
    # Not `os.posix_fallocate`, which writes to every block of the file if the file system cannot.
    if _LIBC.fallocate(file.fileno(), 0, c_int64(0), c_int64(num_bytes)) and (number := get_errno()) in NO_ROOM:
        raise OSError(number, os.strerror(number))


def begin_write_back(file: BinaryIO, num_bytes: int) -> None:
    """Let the system write the last bytes of a file to the disk, so that `flush` has less to wait for."""
    if num_bytes >= MIN_WRITE_BACK_BYTES:
        start = c_int64(file.tell() - num_bytes)
        _LIBC.sync_file_range(file.fileno(), start, c_int64(num_bytes), SYNC_FILE_RANGE_WRITE)


def flush(file: BinaryIO) -> None:
    """Write to the disk what Python and the operating system still buffer of `file`."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Write the names of the files in `folder` to the disk. Only then does a renamed file survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum_offset(content: bytes) -> int:
    """Return the index in `content` of the first digit of the checksum."""
    found = CHECKSUM.search(content)
    assert found is not None
    return found.start(1)


def checksum_digits(checksum: int) -> bytes:
    """Return a CRC-32 as eight hexadecimal digits."""
    return f"{checksum:08x}".encode()
