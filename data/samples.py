"""An endless sequence of samples, each of seq_length predictions, from the documents of one prefix.

A sample is a stretch of the joined documents of an epoch (`Stream`), or whole documents that fit together (`BestFit`).

Sample i depends on (data, split, seq_length, seed) and i alone, neither on the number of ranks nor on the length of the
run. A run therefore resumes from one integer, the number of samples consumed.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data.epochs import Stream, cached_order
from data.errors import DataError
from data.indexed import IndexedDataset, bin_path
from data.packing import BestFit

PARTS = ("train", "validation", "test")
PACKINGS: dict[str, type[Stream] | type[BestFit]] = {"stream": Stream, "best_fit": BestFit}
MAX_EPOCHS_AHEAD = 16  # whose orders are cached at the start; each rank writes those of later ones as it gets there
MIN_CACHED_ENTRIES = 1 << 20  # documents and samples: a smaller order is built faster than its files are opened
VERSION = 1  # of the orders: increase it after a change by which the same facts give another order


@dataclass(frozen=True)
class SampleOptions:
    """The way in which documents become samples.

    `packing` is a name in PACKINGS; with `masks_documents`, samples keep documents apart. Without `checks_cache`,
    cached orders are used without comparing their checksums; `build_cache` compares them.
    """

    seq_length: int
    seed: int
    cache_dir: str | Path | None = None
    checks_cache: bool = True
    packing: str = "stream"
    masks_documents: bool = False


class PackedSamples:
    """The samples of a range of documents of one prefix, of which each epoch has another order.

    `tokens_per_sample` are those that are not padding, on average over an epoch.
    """

    def __init__(self, dataset: IndexedDataset, documents: range, options: SampleOptions) -> None:
        self._dataset, self._documents, self._options = dataset, documents, options
        self.prefix = dataset.prefix
        self._cache_dir = Path(options.cache_dir or f"{dataset.prefix}.cache")
        lengths = dataset.sequence_lengths[documents.start : documents.stop]
        self._packing: Any = PACKINGS[options.packing](lengths, options.seq_length, options.masks_documents)
        self.samples_per_epoch: int = self._packing.samples_per_epoch
        self.tokens_per_sample: float = self._packing.tokens_per_sample
        if not self.samples_per_epoch:
            facts = f"{dataset.prefix}: {len(documents)} documents with {lengths.sum(dtype=np.int64)} tokens"
            raise DataError(f"{facts} {self._packing.need}, change data.split or add data")
        self._current = lru_cache(maxsize=1)(lambda epoch: self._order_of(epoch, options.checks_cache))

    def __getitem__(self, sample: int) -> np.ndarray:
        pieces = [self._dataset[self._documents[document]][part] for document, part in self._pieces(sample)]
        return self._packing.sample(pieces)

    @property
    def fingerprint(self) -> str:
        """The `fingerprint` of all documents of the prefix."""
        return self._dataset.fingerprint

    def place(self, sample: int) -> str:
        """Return the file and the document in which a sample starts, for error messages."""
        document, _ = self._pieces(sample)[0]
        return f"{bin_path(self._dataset.prefix)}, document {self._documents[document]}"

    def build_cache(self, first_sample: int, num_samples: int) -> None:
        """Write the cache files of the first orders that contain these samples, or check them if they exist.

        One rank of each node calls this before the others read samples.
        """
        last_sample = first_sample + num_samples - 1
        epochs = range(first_sample // self.samples_per_epoch, last_sample // self.samples_per_epoch + 1)
        for epoch in epochs[:MAX_EPOCHS_AHEAD] if self._has_cache_files else ():
            self._order_of(epoch, checks=True)

    def _pieces(self, sample: int) -> list[tuple[int, slice]]:
        """Return (document, part of its tokens) of each piece of a sample."""
        epoch, index = divmod(sample, self.samples_per_epoch)
        order = self._current(epoch)
        return self._packing.pieces(order, int(order.shuffle[index]))

    @property
    def _has_cache_files(self) -> bool:
        return len(self._documents) + self.samples_per_epoch >= MIN_CACHED_ENTRIES

    def _order_of(self, epoch: int, checks: bool) -> Any:
        def build() -> Any:
            return self._packing.build(self._options.seed, epoch)

        if not self._has_cache_files:
            return build()
        stem = self._packing.file_prefix + self._file_stem(epoch)
        return cached_order(self._cache_dir, stem, self._packing.order_type, build, checks)

    def _file_stem(self, epoch: int) -> str:
        """Return a name with a digest of all that the order depends on, and of nothing else, such as times of files."""
        options = self._options
        facts = {
            "sequences": len(self._dataset),
            "lengths": self._dataset.lengths_checksum,
            "first_document": self._documents.start,
            "stop_document": self._documents.stop,
            "seq_length": options.seq_length,
            "seed": options.seed,
            "version": VERSION,
        }
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        documents = f"{self._documents.start}-{self._documents.stop}"
        return f"documents_{documents}_seq_{options.seq_length}_seed_{options.seed}_{digest}_epoch_{epoch}"


def split_documents(num_documents: int, weights: Sequence[float]) -> dict[str, range]:
    """Divide the documents into consecutive ranges for train, validation and test, in proportion to the weights."""
    if len(weights) != len(PARTS) or min(weights) < 0 or sum(weights) <= 0:
        raise DataError(f"data.split={list(weights)} must be three weights, none negative, such as [0.98, 0.01, 0.01]")
    shares = np.cumsum(weights) / sum(weights)
    bounds = [0, *np.rint(shares * num_documents).astype(int).tolist()]
    return {part: range(bounds[i], bounds[i + 1]) for i, part in enumerate(PARTS)}
