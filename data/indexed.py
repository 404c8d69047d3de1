"""Megatron's pair of files for tokenized documents, read through a memory map.

PREFIX.bin   | tokens of document 0 | tokens of document 1 | ...                 no header, little-endian
PREFIX.idx   | "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype code | u64 N | u64 D |     34 bytes
             | i32[N] lengths in tokens | i64[N] starts in bytes | i64[D] first sequence of each document, then N |
"""

import struct
import zlib
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.sidecar import INDEX, TOKENS, Sidecar

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences N, number of document indices D
VERSION = 1
BLOCK = 1 << 18  # sequences that are checked at once: their arrays fit into a processor's cache
ENDS_BYTES = 1 << 20  # at the beginning and at the end of the tokens, of which a fingerprint is made
DTYPE_OF_CODE = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}.items()
}


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


class IndexedDataset:
    """The sequences of PREFIX.bin as read-only views of a memory map.

    Opening reads only the header, and indexing copies nothing: `check_index` checks the arrays. `sequence_lengths`
    i32[N] in tokens, `starts` i64[N] in bytes and `document_indices` i64[D] are memory maps as well. IndexedWriter
    writes one sequence for each document. Raises DataError if the pair is missing, truncated, or in another format.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        try:
            self._open_index(idx_path(prefix))
            self._open_tokens(bin_path(prefix))
        except OSError as error:
            raise DataError(f"cannot read {error.filename or prefix} ({error.strerror}); correct data.path") from None

    def _open_index(self, path: Path) -> None:
        index_bytes = _size_of(path, self.prefix)
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
        if not header.startswith(MAGIC) or len(header) < HEADER.size:
            raise DataError(
                f"{path} ({index_bytes} bytes) does not start with a 34-byte MMIDIDX header; prepare it again"
            )
        _, version, code, num_sequences, num_document_indices = HEADER.unpack(header)
        if version != VERSION or code not in DTYPE_OF_CODE:
            raise DataError(
                f"{path} has version {version} and dtype code {code}, "
                f"expected {VERSION} and a code from 1 to 8; prepare it again"
            )
        self.dtype = DTYPE_OF_CODE[code]
        if self.dtype.kind == "f":
            raise DataError(f"{path} describes numbers of type {self.dtype}, tokens are integers; prepare it again")
        ends = list(accumulate([HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_document_indices]))
        # Megatron may append the mode of each sequence, one byte.
        if index_bytes not in (ends[-1], ends[-1] + num_sequences):
            raise DataError(
                f"{path} has {index_bytes} bytes, its header describes {ends[-1]}; copy or prepare it again"
            )
        if num_sequences == 0:
            raise DataError(f"{path} holds 0 documents, at least 1 is needed; prepare it from a source with text")
        content = np.memmap(path, mode="r").view(np.ndarray)
        self.sequence_lengths = content[ends[0] : ends[1]].view("<i4")
        self.starts = content[ends[1] : ends[2]].view("<i8")
        self.document_indices = content[ends[2] : ends[3]].view("<i8")
        if self.document_indices[-1:].tolist() != [num_sequences]:
            raise DataError(f"{path}: its last document index is not its {num_sequences} sequences; prepare it again")

    def _open_tokens(self, path: Path) -> None:
        actual_bytes = _size_of(path, self.prefix)
        expected_bytes = int(self.starts[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if actual_bytes != expected_bytes or expected_bytes == 0:
            raise DataError(
                f"{path} has {actual_bytes} bytes, its index describes {expected_bytes}; copy or prepare the pair again"
            )
        self._tokens = np.memmap(path, dtype=self.dtype, mode="r").view(np.ndarray)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        start = int(self.starts[sequence]) // self.dtype.itemsize
        return self._tokens[start : start + int(self.sequence_lengths[sequence])]

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @cached_property
    def fingerprint(self) -> str:
        """A text by which a corpus is told from others, wherever it is: of its lengths and its tokens.

        The checksum of the tokens is that of PREFIX.json; without one, it is that of their first and last megabyte.
        """
        recorded = Sidecar.load(self.prefix).checksums if Sidecar.path(self.prefix).is_file() else {}
        if (checksum := recorded.get(TOKENS)) is None:
            count = ENDS_BYTES // self.dtype.itemsize
            checksum = zlib.crc32(np.concatenate((self._tokens[:count], self._tokens[-count:])).data)
        return f"{len(self)}-{self.num_tokens}-{self.dtype.itemsize}-{self.lengths_checksum:08x}-{checksum:08x}"

    @cached_property
    def lengths_checksum(self) -> int:
        """The CRC-32 of all lengths, which with their number is all that an order of samples depends on."""
        return zlib.crc32(np.ascontiguousarray(self.sequence_lengths).data)


def _size_of(path: Path, prefix: str) -> int:
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; data.path takes the common prefix of a .bin and an .idx file, "
            f"as written by python -m data.prepare --output {prefix}"
        )
    return path.stat().st_size


def check_index(dataset: IndexedDataset) -> None:
    """Raise DataError if an array of the index is inconsistent, or if PREFIX.json describes another index.

    The arrays are read once, a block at a time, so that an index of any size needs little memory. The checksum that
    `data.prepare` records shows also a change that leaves the arrays consistent.
    """
    path = idx_path(dataset.prefix)
    if problem := _problem(dataset):
        raise DataError(f"{path} is damaged: {problem}; copy or prepare it again")
    if Sidecar.path(dataset.prefix).is_file():
        sidecar = Sidecar.load(dataset.prefix)
        sidecar.check_file(dataset.prefix, INDEX)
        for name, count in (("documents", len(dataset)), ("tokens", dataset.num_tokens)):
            if getattr(sidecar, name) != count:
                raise DataError(
                    f"{path} holds {count} {name}, {Sidecar.path(dataset.prefix)} says {getattr(sidecar, name)}: they "
                    "belong to different corpora; copy or prepare all files again"
                )


def _problem(dataset: IndexedDataset) -> str | None:
    """Return a description of the first inconsistency; None if there is none."""
    item_bytes, expected = dataset.dtype.itemsize, 0
    for block in _blocks(len(dataset)):
        lengths, starts = dataset.sequence_lengths[block].astype(np.int64), dataset.starts[block]
        if lengths.min() < 0:
            sequence = int(np.argmax(lengths < 0))
            return f"sequence {block.start + sequence} has a length of {lengths[sequence]} tokens"
        ends = starts + lengths * item_bytes
        is_wrong = starts != np.concatenate(([expected], ends[:-1]))
        if is_wrong.any():
            sequence = int(np.argmax(is_wrong))
            where = ends[sequence - 1] if sequence else expected
            return (
                f"sequence {block.start + sequence} starts at byte {starts[sequence]}, the one before ends at {where}"
            )
        expected = int(ends[-1])
    return _problem_of_documents(dataset)


def _problem_of_documents(dataset: IndexedDataset) -> str | None:
    indices, before = dataset.document_indices, 0
    if indices[0] != 0:
        return f"document 0 begins with sequence {indices[0]}, not with sequence 0"
    for block in _blocks(len(indices)):
        is_wrong = indices[block] < np.concatenate(([before], indices[block][:-1]))
        if is_wrong.any():
            document = block.start + int(np.argmax(is_wrong))
            return f"document {document} begins with sequence {indices[document]}, before the document ahead of it"
        before = int(indices[block][-1])
    return None  # the last one is the number of sequences, which was compared when the file was opened


def _blocks(count: int) -> Iterator[slice]:
    return (slice(first, min(first + BLOCK, count)) for first in range(0, count, BLOCK))
