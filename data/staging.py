"""The output of a preparation: written by one process at a time, into a hidden folder, and renamed when complete."""

import os
import shutil
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
from filelock import FileLock, Timeout

from data.errors import LOCKS_ARE_MISSING, DataError
from data.indexed import DTYPE_OF_CODE, HEADER, MAGIC, VERSION, bin_path, idx_path

MAX_U16_VOCAB_SIZE = 65500  # the bound that Megatron uses, so that both choose the same type


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type of a stored token: u16 if the vocabulary fits, else i32."""
    return np.dtype("<u2" if vocab_size < MAX_U16_VOCAB_SIZE else "<i4")


@contextmanager
def reserved(output: Path) -> Iterator[None]:
    """Hold the lock of a prefix in this block. Raises DataError if another process holds it."""
    if output.name in ("", ".."):
        raise DataError(f"--output {output} names no files; give the beginning of their names, such as data/corpus")
    path = output.with_name(f".{output.name}.lock")
    # No fallback to a lock that consists in the existence of a file: it would outlive a process that is killed.
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise DataError(
            f"--output {output} is being written by another process, which holds {path}; wait, or choose another"
        ) from None
    except OSError as error:
        if error.errno not in LOCKS_ARE_MISSING:
            raise
    try:
        yield
    finally:
        # While the lock is held: a process that has opened the file meanwhile notices that it is no longer there.
        path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def staging_folder(output: Path) -> Iterator[Path]:
    """Make the hidden folder of a prefix, and remove it at the end, as well as one that a killed process has left."""
    folder = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class IndexedWriter:
    """A context manager that appends documents to PREFIX.bin, and writes PREFIX.idx when its block ends.

    If the block raises, the index is not written, so that the unfinished pair cannot be opened. The writer keeps four
    bytes a document in memory.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = 0
        self.bin_checksum = 0  # CRC-32 of what has been appended
        self._lengths = array("i")

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append whole documents, given as their joined tokens and the number of tokens of each."""
        assert len(tokens) == lengths.sum()
        content = np.asarray(tokens, dtype=self.dtype).data
        self._bin.write(content)
        self.bin_checksum = zlib.crc32(content, self.bin_checksum)
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())
        self.num_tokens += len(tokens)

    def __enter__(self) -> Self:
        self._bin = open(bin_path(self.prefix), "wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            # The tokens are on the disk before the index is written: an index that exists describes a complete file.
            self._bin.flush()
            os.fsync(self._bin.fileno())
            self._write_index()
        self._bin.close()

    def _write_index(self) -> None:
        lengths = np.asarray(np.frombuffer(self._lengths, dtype=np.intc), dtype="<i4")
        starts = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype="<i8", out=starts[1:])
        starts *= self.dtype.itemsize
        code = next(code for code, dtype in DTYPE_OF_CODE.items() if dtype == self.dtype)
        with open(idx_path(self.prefix), "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            file.write(lengths.data)
            file.write(starts.data)
            file.write(np.arange(len(lengths) + 1, dtype="<i8").data)
            file.flush()
            os.fsync(file.fileno())
