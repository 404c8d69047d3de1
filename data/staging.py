"""The output of a preparation: written by one process at a time, into a hidden folder, and renamed when complete.

The folder of a preparation that was interrupted is kept if its progress was saved, and the next one goes on there.
"""

import json
import os
import shutil
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from filelock import FileLock, Timeout

from data.errors import LOCKS_ARE_MISSING, DataError
from data.indexed import DTYPE_OF_CODE, HEADER, MAGIC, VERSION, IndexedDataset, bin_path, idx_path, part_prefix
from data.sidecar import CHUNK_BYTES, INDEX, OWN_CHECKSUM, TOKENIZER, TOKENS, Sidecar, checksum_of, file_checksum
from data.tokenizer import tokenizer_path
from parallel.validation.files import read_note
from parallel.validation.paths import remove

PROGRESS = "progress.json"  # in the hidden folder
MAX_U16_VOCAB_SIZE = 65500  # the bound that Megatron uses, so that both choose the same type


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type of a stored token: u16 if the vocabulary fits, else i32."""
    return np.dtype("<u2" if vocab_size < MAX_U16_VOCAB_SIZE else "<i4")


@contextmanager
def reserved(output: Path, *, waits: bool = False) -> Iterator[None]:
    """Hold the lock of a prefix in this block, or raise DataError if another process does and this one not `waits`."""
    if output.name in ("", ".."):
        raise DataError(f"--output {output} names no files; give the beginning of their names, such as data/corpus")
    path = output.with_name(f".{output.name}.lock")
    # No fallback to a lock that consists in the existence of a file: it would outlive a process that is killed.
    lock = FileLock(path, blocking=waits, fallback_to_soft=False)
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


@dataclass(frozen=True)
class Progress:
    """Progress of the preparation `plan`: `read` documents, of which `empty` and `rejected` were left out.

    `weight` is theirs, `bin_bytes` and `rejected_bytes` are the sizes of the files.
    """

    plan: str
    read: int = 0
    empty: int = 0
    rejected: int = 0
    weight: float = 0.0
    bin_bytes: int = 0
    rejected_bytes: int = 0

    @property
    def written(self) -> int:
        """The number of documents that were written."""
        return self.read - self.empty - self.rejected

    @classmethod
    def load(cls, folder: Path, plan: str) -> Self:
        """Return the progress that was saved in a folder; none if it is missing, damaged or that of another plan."""
        try:
            facts = json.loads(read_note(folder / PROGRESS))
            if facts.pop(OWN_CHECKSUM) == checksum_of(facts) and facts["plan"] == plan:
                return cls(**facts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return cls(plan)

    def save(self, folder: Path) -> None:
        """Save it. The files whose sizes it has must be on the disk."""
        unfinished = folder / f"{PROGRESS}.unfinished"
        facts = asdict(self)
        unfinished.write_text(json.dumps(facts | {OWN_CHECKSUM: checksum_of(facts)}))
        os.replace(unfinished, folder / PROGRESS)


@contextmanager
def staging_folder(output: Path, plan: str) -> Iterator[tuple[Path, Progress]]:
    """Make the hidden folder of a prefix, or take one with saved progress of the same plan; yield it and its progress.

    At the end it is removed, unless an error ends a preparation whose progress was saved.
    """
    folder = output.with_name(f".{output.name}.unfinished")
    if folder.is_symlink():
        remove(folder)
    progress = Progress.load(folder, plan)
    if not progress.read:
        remove(folder)
        folder.mkdir()
    try:
        yield folder, progress
    except BaseException:
        if not (folder / PROGRESS).exists():
            remove(folder)
        raise
    remove(folder)


class IndexedWriter:
    """A context manager that appends documents to PREFIX.bin, and writes PREFIX.idx when its block ends.

    If the block raises, the index is not written, so that the unfinished pair cannot be opened. The writer keeps four
    bytes a document in memory. The first `kept_bytes` of a file that exists are kept; `restore` reads them.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype, kept_bytes: int = 0) -> None:
        self.prefix, self._kept_bytes = prefix, kept_bytes
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = 0
        self.bin_checksum = 0  # CRC-32 of what has been appended
        self._lengths = array("i")

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    @property
    def num_bytes(self) -> int:
        """The size of PREFIX.bin."""
        return self.num_tokens * self.dtype.itemsize

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append whole documents, given as their joined tokens and the number of tokens of each."""
        assert len(tokens) == lengths.sum()
        content = np.asarray(tokens, dtype=self.dtype).data
        self._bin.write(content)
        self.bin_checksum = zlib.crc32(content, self.bin_checksum)
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())
        self.num_tokens += len(tokens)

    def restore(self, eod: int, ends_in_document: int = 1) -> None:
        """Take up the documents that are kept, each of which has the token `eod` so many times, the last at its end."""
        length = num_ends = 0  # of the document that is being read
        self._bin.seek(0)
        while content := self._bin.read(CHUNK_BYTES):
            self.bin_checksum = zlib.crc32(content, self.bin_checksum)
            tokens = np.frombuffer(content, dtype=self.dtype)
            found = np.flatnonzero(tokens == eod) + 1
            ends = found[ends_in_document - 1 - num_ends :: ends_in_document]
            num_ends = (num_ends + len(found)) % ends_in_document
            self._lengths.frombytes(np.diff(ends, prepend=-length).astype(np.intc).tobytes())
            length = len(tokens) - int(ends[-1]) if len(ends) else length + len(tokens)
            self.num_tokens += len(tokens)

    def sync(self) -> None:
        """Write what has been appended to the disk."""
        self._bin.flush()
        os.fsync(self._bin.fileno())

    def __enter__(self) -> Self:
        self._bin = open(bin_path(self.prefix), "r+b" if self._kept_bytes else "w+b")
        self._bin.truncate(self._kept_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            # The tokens are on the disk before the index is written: an index that exists describes a complete file.
            self.sync()
            self._write_index()
        self._bin.close()

    def _write_index(self) -> None:
        write_index(idx_path(self.prefix), self.dtype, [np.frombuffer(self._lengths, dtype=np.intc)])


def write_index(path: Path, dtype: np.dtype, lengths_of_parts: Sequence[np.ndarray]) -> None:
    """Write the index of documents of these lengths, in one file or in those of several parts, one after the other."""
    code = next(code for code, known in DTYPE_OF_CODE.items() if known == dtype)
    count, first_byte = sum(map(len, lengths_of_parts)), 0
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        for lengths in lengths_of_parts:
            file.write(np.asarray(lengths, dtype="<i4").data)
        for lengths in lengths_of_parts:
            bounds = np.zeros(len(lengths) + 1, dtype="<i8")
            np.cumsum(lengths, dtype="<i8", out=bounds[1:])
            bounds = bounds * dtype.itemsize + first_byte
            file.write(bounds[:-1].data)
            first_byte = int(bounds[-1])
        file.write(np.arange(count + 1, dtype="<i8").data)
        file.flush()
        os.fsync(file.fileno())


def join_parts(prefix: Path, count: int) -> bool:
    """Write the index and the facts by which `count` parts are read as one corpus; return False if one is missing.

    The caller holds the lock of the prefix. Raises DataError if a part is of another corpus.
    """
    parts = [part_prefix(prefix, number, count) for number in range(1, count + 1)]
    if not all(idx_path(part).is_file() for part in parts):
        return False
    datasets, sidecars = [IndexedDataset(part) for part in parts], [Sidecar.load(part) for part in parts]
    for number, sidecar in enumerate(sidecars, 1):
        if sidecar.of_corpus != sidecars[0].of_corpus:
            raise DataError(
                f"{parts[number - 1]} was prepared from another source or with other options than {parts[0]}; prepare "
                f"both with the same command, and --part {number}/{count} --overwrite"
            )
    with staging_folder(prefix, "") as (folder, _):
        staged = folder / prefix.name
        shutil.copyfile(tokenizer_path(parts[0]), tokenizer_path(staged))
        write_index(idx_path(staged), datasets[0].dtype, [dataset.sequence_lengths for dataset in datasets])
        of_tokens = [sidecar.checksums[TOKENS] for sidecar in sidecars]
        of_files = {suffix: file_checksum(f"{staged}{suffix}") for suffix in (INDEX, TOKENIZER)}
        counts = "documents", "tokens", "empty", "rejected"
        sums = {name: sum(getattr(each, name) for each in sidecars) for name in counts}
        replace(
            sidecars[0],
            **sums,
            checksums={TOKENS: checksum_of({"parts": of_tokens}), **of_files},
            parts=[[bin_path(part).stat().st_size, checksum] for part, checksum in zip(parts, of_tokens, strict=True)],
        ).save(staged)
        for path in (tokenizer_path, Sidecar.path, idx_path):
            os.replace(path(staged), path(prefix))
    return True
