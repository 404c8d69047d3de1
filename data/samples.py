"""An endless sequence of samples of seq_length + 1 tokens, packed across the documents of one prefix.

Sample i depends on (data, split, seq_length, seed) and i alone, neither on the number of ranks nor on the length of the
run. A run therefore resumes from one integer, the number of samples consumed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from data.epochs import EpochOrder, Recipe, build_epoch, cached_epoch
from data.errors import DataError
from data.indexed import IndexedDataset, bin_path, idx_path

PARTS = ("train", "validation", "test")
MAX_EPOCHS_AHEAD = 16  # whose orders are cached at the start; each rank writes those of later ones as it gets there
MIN_CACHED_ENTRIES = 1 << 20  # documents and samples: a smaller order is built faster than its files are opened


class Samples(Protocol):
    """An endless sequence of samples, int64 arrays of shape (seq_length + 1,)."""

    def __getitem__(self, sample: int) -> np.ndarray: ...

    def place(self, sample: int) -> str:
        """Return the file and the document in which a sample starts, for error messages."""

    def build_cache(self, first_sample: int, num_samples: int) -> None:
        """Write the cache files of the first orders that contain these samples, or check them if they exist.

        One rank of each node calls this before the others read samples.
        """


class PackedSamples:
    """The samples of a range of documents of one prefix, of which each epoch has another order.

    Without `checks_cache`, cached orders are used without comparing their checksums; `build_cache` compares them.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        *,
        seq_length: int,
        seed: int,
        cache_dir: str | Path | None = None,
        checks_cache: bool = True,
    ) -> None:
        self._dataset = dataset
        self._documents = documents
        self._seq_length = seq_length
        self._seed = seed
        self._checks_cache = checks_cache
        self._cache_dir = Path(cache_dir or f"{dataset.prefix}.cache")
        self.num_tokens = dataset.first_token(documents.stop) - dataset.first_token(documents.start)
        if self.num_tokens < seq_length + 1:
            raise DataError(
                f"{dataset.prefix}: {len(documents)} documents with {self.num_tokens} tokens are fewer than "
                f"model.seq_length + 1 = {seq_length + 1}; lower model.seq_length, change data.split or add data"
            )
        self.samples_per_epoch = (self.num_tokens - 1) // seq_length
        self._current: tuple[int, EpochOrder] | None = None

    def __getitem__(self, sample: int) -> np.ndarray:
        order, number = self._find(sample)
        # The sample ends with token `stop` of the last document, which is also the first token of the next sample.
        (first, start), (last, stop) = order.sample_starts[number : number + 2].tolist()
        documents = order.document_order[first : last + 1].tolist()
        pieces = [self._dataset[self._documents[document]] for document in documents]
        # The end is cut first: if there is one document only, `stop` counts from its beginning.
        pieces[-1] = pieces[-1][: stop + 1]
        pieces[0] = pieces[0][start:]
        return np.concatenate(pieces, dtype=np.int64)

    def place(self, sample: int) -> str:
        order, number = self._find(sample)
        document = self._documents[int(order.document_order[order.sample_starts[number, 0]])]
        return f"{bin_path(self._dataset.prefix)}, document {document}"

    def build_cache(self, first_sample: int, num_samples: int) -> None:
        if not self._has_cache_files:
            return
        last_sample = first_sample + num_samples - 1
        epochs = range(first_sample // self.samples_per_epoch, last_sample // self.samples_per_epoch + 1)
        for epoch in epochs[:MAX_EPOCHS_AHEAD]:
            self._order_of(epoch, checks=True)

    def _find(self, sample: int) -> tuple[EpochOrder, int]:
        """Return the order of a sample's epoch, and the index of the sample in its `sample_starts`."""
        epoch, index = divmod(sample, self.samples_per_epoch)
        current = self._current  # read once, because another thread may replace it
        if current is None or current[0] != epoch:
            current = self._current = (epoch, self._order_of(epoch, self._checks_cache))
        return current[1], int(current[1].shuffle[index])

    @property
    def _has_cache_files(self) -> bool:
        return len(self._documents) + self.samples_per_epoch >= MIN_CACHED_ENTRIES

    def _order_of(self, epoch: int, checks: bool) -> EpochOrder:
        if not self._has_cache_files:
            return self._build(epoch)
        recipe = Recipe(
            name=Path(self._dataset.prefix).name,
            bin_bytes=bin_path(self._dataset.prefix).stat().st_size,
            idx_bytes=idx_path(self._dataset.prefix).stat().st_size,
            idx_mtime_ns=idx_path(self._dataset.prefix).stat().st_mtime_ns,
            first_document=self._documents.start,
            stop_document=self._documents.stop,
            seq_length=self._seq_length,
            seed=self._seed,
        )
        return cached_epoch(self._cache_dir, recipe.file_stem(epoch), lambda: self._build(epoch), checks)

    def _build(self, epoch: int) -> EpochOrder:
        lengths = self._dataset.sequence_lengths[self._documents.start : self._documents.stop]
        return build_epoch(lengths, seq_length=self._seq_length, seed=self._seed, epoch=epoch)


def split_documents(num_documents: int, weights: Sequence[float]) -> dict[str, range]:
    """Divide the documents into consecutive ranges for train, validation and test, in proportion to the weights."""
    if len(weights) != len(PARTS) or min(weights) < 0 or sum(weights) <= 0:
        raise DataError(f"data.split={list(weights)} must be three weights, none negative, such as [0.98, 0.01, 0.01]")
    shares = np.cumsum(weights) / sum(weights)
    bounds = [0, *np.rint(shares * num_documents).astype(int).tolist()]
    return {part: range(bounds[i], bounds[i + 1]) for i, part in enumerate(PARTS)}
