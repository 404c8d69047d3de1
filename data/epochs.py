"""The order of one epoch: documents are shuffled and joined, then cut into samples, which are shuffled.

    document_order   7 | 2       | 0    | 5 ...        document numbers, shuffled
    tokens           aaabbbbbbbbbbcccccccddddd...
    samples          |  0  |  1  |  2  |  3  |          seq_length + 1 tokens each; neighbours share one
    sample_starts    (0, 0) (1, 2) (1, 8) ...           (place in document_order, token within that document)
    shuffle          2 0 3 1                            the epoch's i-th sample is number shuffle[i]

Large orders are kept in files and memory-mapped. Every rank may write the files, because all write the same bytes.
"""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from data.errors import DataError
from data.sidecar import file_checksum

Order = TypeVar("Order")  # a dataclass of arrays

VERSION = 1  # of build_epoch: increase it after a change by which the same recipe gives another order


@dataclass(frozen=True)
class EpochOrder:
    """The arrays of an epoch: document_order (documents,), sample_starts (samples + 1, 2), shuffle (samples,).

    Each has the smallest unsigned type that holds its values.
    """

    document_order: np.ndarray
    sample_starts: np.ndarray
    shuffle: np.ndarray


@dataclass(frozen=True)
class Recipe:
    """Everything that the order of an epoch depends on; a digest of it is part of the names of its files.

    The document lengths are represented by the modification time of the index file.
    """

    name: str
    bin_bytes: int
    idx_bytes: int
    idx_mtime_ns: int
    first_document: int
    stop_document: int
    seq_length: int
    seed: int
    version: int = VERSION

    def file_stem(self, epoch: int) -> str:
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()[:16]
        documents = f"{self.first_document}-{self.stop_document}"
        return f"documents_{documents}_seq_{self.seq_length}_seed_{self.seed}_{digest}_epoch_{epoch}"


def build_epoch(lengths: np.ndarray, *, seq_length: int, seed: int, epoch: int) -> EpochOrder:
    """Return the order of `epoch` over documents of these lengths in tokens, a function of the arguments alone."""
    generator = np.random.default_rng([seed, epoch])
    document_order = shuffled(len(lengths), generator)
    ends = np.cumsum(lengths[document_order], dtype=np.int64)  # of the shuffled documents, in the joined tokens
    num_samples = (int(ends[-1]) - 1) // seq_length
    starts = np.arange(0, num_samples * seq_length + 1, seq_length)  # of the samples, in the joined tokens
    places = np.searchsorted(ends, starts, side="right")
    offsets = starts - ends[places] + lengths[document_order[places]]
    starts_type = np.min_scalar_type(max(len(lengths), int(offsets.max())))
    sample_starts = np.stack([places.astype(starts_type), offsets.astype(starts_type)], axis=1)
    return EpochOrder(document_order, sample_starts, shuffled(num_samples, generator))


def cached_epoch(folder: Path, stem: str, kind: type[Order], build: Callable[[], Order], checks: bool = True) -> Order:
    """Return the order stored in the files `folder`/`stem`.*, memory-mapped. Build and write it if one is missing.

    `kind` is the dataclass of arrays that `build` returns. With `checks`, the files are read once and compared with
    their checksums. Raises DataError if one is damaged.
    """
    names = [field.name for field in dataclasses.fields(cast(Any, kind))]
    paths = {name: folder / f"{stem}.{name}.npy" for name in names}
    checksums = folder / f"{stem}.crc32.json"
    if not all(path.exists() for path in (*paths.values(), checksums)):
        _save(build(), paths, checksums)
    try:
        if checks and json.loads(checksums.read_bytes()) != _checksums(paths.values()):
            raise ValueError("its files are not those that were written")
        return kind(**{name: np.load(path, mmap_mode="r") for name, path in paths.items()})
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read the sample order {folder / stem} ({error}); delete {folder}") from None


def _checksums(paths: Iterable[Path]) -> dict[str, int]:
    return {path.name: file_checksum(path) for path in paths}


def shuffled(count: int, generator: np.random.Generator) -> np.ndarray:
    """Return the numbers below `count` in random order, in the smallest unsigned type that holds `count`."""
    numbers = np.arange(count, dtype=np.min_scalar_type(count))
    generator.shuffle(numbers)
    return numbers


def _save(order: Any, paths: dict[str, Path], checksums: Path) -> None:
    """Write each file into a folder that only this process uses, then rename it: other processes find it complete."""
    folder = checksums.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished.", dir=folder) as staging:
            for name, path in paths.items():
                np.save(Path(staging, path.name), getattr(order, name))
            written = _checksums(Path(staging, path.name) for path in paths.values())
            Path(staging, checksums.name).write_text(json.dumps(written) + "\n")
            for path in (*paths.values(), checksums):
                os.replace(Path(staging, path.name), path)
    except OSError as error:
        raise DataError(
            f"cannot write the sample order to {folder} ({error.strerror}); "
            "set data.cache_dir to a folder that this user may write"
        ) from None
