"""The order of one epoch: documents are shuffled and joined, then cut into samples, which are shuffled.

    document_order   7 | 2       | 0    | 5 ...        document numbers, shuffled
    tokens           aaabbbbbbbbbbcccccccddddd...
    samples          |  0  |  1  |  2  |  3  |          seq_length + 1 tokens each; neighbours share one
    sample_starts    (0, 0) (1, 2) (1, 8) ...           (place in document_order, token within that document)
    shuffle          2 0 3 1                            the epoch's i-th sample is number shuffle[i]

Large orders are kept in files and memory-mapped. Every rank may write the files, because all write the same bytes.
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.documents import joined_apart
from data.errors import DataError
from data.sidecar import file_checksum
from parallel.validation.files import FACTS_BYTES, read_limited


@dataclass(frozen=True)
class StreamOrder:
    """The arrays of an epoch: document_order (documents,), sample_starts (samples + 1, 2), shuffle (samples,).

    Each has the smallest unsigned type that holds its values.
    """

    document_order: np.ndarray
    sample_starts: np.ndarray
    shuffle: np.ndarray


class Stream:
    """Samples of documents of these lengths: stretches of the joined documents, of which neighbours share a token."""

    order_type, file_prefix = StreamOrder, ""

    def __init__(self, lengths: np.ndarray, seq_length: int, masks_documents: bool) -> None:
        self._lengths, self._seq_length, self._masks_documents = lengths, seq_length, masks_documents
        self.samples_per_epoch = max(0, int(lengths.sum(dtype=np.int64)) - 1) // seq_length
        self.tokens_per_sample = float(seq_length)
        self.need = f"are fewer than model.seq_length + 1 = {seq_length + 1}; lower model.seq_length"
        if masks_documents and lengths.max(initial=0) < 2:
            self.samples_per_epoch, self.need = 0, "have no prediction if kept apart; choose data.mask_documents=false"

    def build(self, seed: int, epoch: int) -> StreamOrder:
        """Return the order of an epoch, a function of the arguments and the lengths alone."""
        lengths, seq_length = self._lengths, self._seq_length
        generator = np.random.default_rng([seed, epoch])
        document_order = shuffled(len(lengths), generator)
        ends = np.cumsum(lengths[document_order], dtype=np.int64)  # of the shuffled documents, in the joined tokens
        num_samples = (int(ends[-1]) - 1) // seq_length
        starts = np.arange(0, num_samples * seq_length + 1, seq_length)  # of the samples, in the joined tokens
        places = np.searchsorted(ends, starts, side="right")
        offsets = starts - ends[places] + lengths[document_order[places]]
        starts_type = np.min_scalar_type(max(len(lengths), int(offsets.max())))
        sample_starts = np.stack([places.astype(starts_type), offsets.astype(starts_type)], axis=1)
        return StreamOrder(document_order, sample_starts, shuffled(num_samples, generator))

    def pieces(self, order: StreamOrder, number: int) -> list[tuple[int, slice]]:
        """Return (document, part of its tokens) of each piece of a sample."""
        # The sample ends with token `stop` of the last document, which is also the first token of the next sample.
        (first, start), (last, stop) = order.sample_starts[number : number + 2].tolist()
        return [
            (document, slice(start if place == first else 0, stop + 1 if place == last else None))
            for place, document in enumerate(order.document_order[first : last + 1].tolist(), first)
        ]

    def sample(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Return the sample of the tokens of these pieces."""
        return joined_apart(pieces) if self._masks_documents else np.concatenate(pieces, dtype=np.int64)


def shuffled(count: int, generator: np.random.Generator) -> np.ndarray:
    """Return the numbers below `count` in random order, in the smallest unsigned type that holds `count`."""
    numbers = np.arange(count, dtype=np.min_scalar_type(count))
    generator.shuffle(numbers)
    return numbers


def cached_order(folder: Path, stem: str, order_type: type[Any], build: Callable[[], Any], checks: bool = True) -> Any:
    """Return the order stored in the files `folder`/`stem`.*, memory-mapped. Build and write it if one is missing.

    `order_type` is the dataclass of arrays that `build` returns. With `checks`, the files are read once and compared
    with their checksums. Raises DataError if one is damaged.
    """
    paths = {field.name: folder / f"{stem}.{field.name}.npy" for field in dataclasses.fields(order_type)}
    checksums = folder / f"{stem}.crc32.json"
    if not _exist(paths, checksums):
        _save(build(), paths, checksums)
    try:
        if checks and json.loads(read_limited(checksums, FACTS_BYTES)) != _checksums(paths.values()):
            raise ValueError("its files are not those that were written")
        return order_type(**{name: np.load(path, mmap_mode="r") for name, path in paths.items()})
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read the sample order {folder / stem} ({error}); delete {folder}") from None


def _exist(paths: dict[str, Path], checksums: Path) -> bool:
    return all(path.exists() for path in (*paths.values(), checksums))


def _checksums(paths: Iterable[Path]) -> dict[str, int]:
    return {path.name: file_checksum(path) for path in paths}


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
            # Files that another process has written meanwhile may be mapped already: on NFS, its node would lose them.
            for path in () if _exist(paths, checksums) else (*paths.values(), checksums):
                os.replace(Path(staging, path.name), path)
    except OSError as error:
        raise DataError(
            f"cannot write the sample order to {folder} ({error.strerror}); "
            "set data.cache_dir to a folder that this user may write"
        ) from None
