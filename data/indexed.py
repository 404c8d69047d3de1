"""Megatron's pair of files for tokenized documents, read through a memory map.

PREFIX.bin   | tokens of document 0 | tokens of document 1 | ...                 no header, little-endian
PREFIX.idx   | "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype code | u64 N | u64 D |     34 bytes
             | i32[N] lengths in tokens | i64[N] starts in bytes | i64[D] first sequence of each document, then N |

The tokens of a corpus of parts are PREFIX.part-1-of-4.bin to PREFIX.part-4-of-4.bin, which PREFIX.idx describes as if
they were one file. Each part is a corpus as well.
"""

import bisect
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
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


def part_prefix(prefix: str | Path, number: int, count: int) -> Path:
    """Return the prefix of a part, from 1 to `count`, of a corpus."""
    return Path(f"{prefix}.part-{number}-of-{count}")


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
            self._open_tokens(*self._files_of_tokens())
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

    def _files_of_tokens(self) -> tuple[list[Path], list[int]]:
        """Return the files of the tokens, and their sizes in bytes."""
        path = bin_path(self.prefix)
        num_bytes = int(self.starts[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        parts = Sidecar.load(self.prefix).parts if Sidecar.path(self.prefix).is_file() and not path.is_file() else []
        sizes = [size for size, _ in parts]
        if sizes and (sum(sizes) != num_bytes or any(size % self.dtype.itemsize for size in sizes)):
            raise DataError(
                f"{idx_path(self.prefix)} describes {num_bytes} bytes, {Sidecar.path(self.prefix)} says {sum(sizes)}: "
                "they belong to different corpora; copy or prepare all files again"
            )
        paths = [bin_path(part_prefix(self.prefix, number, len(sizes))) for number in range(1, len(sizes) + 1)]
        return (paths, sizes) if sizes else ([path], [num_bytes])

    def _open_tokens(self, paths: Sequence[Path], sizes: Sequence[int]) -> None:
        for path, expected_bytes in zip(paths, sizes, strict=True):
            if (actual_bytes := _size_of(path, self.prefix)) != expected_bytes or expected_bytes == 0:
                raise DataError(
                    f"{path} has {actual_bytes} bytes, its index describes {expected_bytes}; copy or prepare the pair "
                    "again"
                )
        self._tokens = [np.memmap(path, dtype=self.dtype, mode="r").view(np.ndarray) for path in paths]
        self._firsts = [0, *accumulate(map(len, self._tokens))]  # token of each file, and the number of all

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        start = int(self.starts[sequence]) // self.dtype.itemsize
        file = bisect.bisect_right(self._firsts, start, hi=len(self._tokens)) - 1
        start -= self._firsts[file]
        return self._tokens[file][start : start + int(self.sequence_lengths[sequence])]

    @property
    def num_tokens(self) -> int:
        return self._firsts[-1]

    @cached_property
    def fingerprint(self) -> str:
        """A text by which a corpus is told from others, wherever it is: of its lengths and its tokens.

        The checksum of the tokens is that of PREFIX.json; without one, it is that of their first and last megabyte.
        """
        recorded = Sidecar.load(self.prefix).checksums if Sidecar.path(self.prefix).is_file() else {}
        if (checksum := recorded.get(TOKENS)) is None:
            count = ENDS_BYTES // self.dtype.itemsize
            checksum = zlib.crc32(np.concatenate((self._tokens[0][:count], self._tokens[-1][-count:])).data)
        return f"{len(self)}-{self.num_tokens}-{self.dtype.itemsize}-{self.lengths_checksum:08x}-{checksum:08x}"

    @cached_property
    def lengths_checksum(self) -> int:
        """The CRC-32 of all lengths, which with their number is all that an order of samples depends on."""
        return zlib.crc32(np.ascontiguousarray(self.sequence_lengths).data)


def missing_parts(prefix: str | Path) -> list[str]:
    """Return the missing parts of a corpus of parts, such as 3/64; none of another corpus."""
    pattern = re.compile(rf"{re.escape(Path(prefix).name)}\.part-([0-9]{{1,6}})-of-([0-9]{{1,6}})\.idx")
    names = (path.name for path in Path(prefix).parent.glob("*.idx"))
    present = {(int(found[2]), int(found[1])) for name in names if (found := pattern.fullmatch(name))}
    count, _ = max(present, default=(0, 0))
    return [f"{number}/{count}" for number in range(1, count + 1) if (count, number) not in present]


def _size_of(path: Path, prefix: str) -> int:
    if not path.is_file():
        if missing := missing_parts(prefix):
            raise DataError(f"{path} does not exist: {prefix} lacks the parts {' '.join(missing)}; prepare them")
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
        check_parts(dataset.prefix, sidecar)


def check_parts(prefix: str, sidecar: Sidecar) -> None:
    """Raise DataError if a part of a corpus is another one than when its parts were joined."""
    for number, (_, checksum) in enumerate(sidecar.parts, 1):
        part = part_prefix(prefix, number, len(sidecar.parts))
        if Sidecar.load(part).checksums.get(TOKENS) != checksum:
            raise DataError(
                f"{bin_path(part)} was prepared again, and is not the part of {prefix}; prepare the same source with "
                f"--part {number}/{len(sidecar.parts)} --overwrite"
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
