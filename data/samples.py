"""An endless sequence of samples, each of seq_length predictions, from the documents of one prefix.

A sample is a stretch of the joined documents of an epoch (`Stream`), or whole documents that fit together (`BestFit`).

Sample i depends on (data, split, seq_length, seed) and i alone, neither on the number of ranks nor on the length of the
run. A run therefore resumes from one integer, the number of samples consumed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Required, TypedDict

import numpy as np

from data.documents import joined_apart, packed_apart
from data.epochs import EpochOrder, Recipe, build_epoch, cached_epoch
from data.errors import DataError
from data.indexed import IndexedDataset, bin_path, idx_path
from data.packing import PackedOrder, best_fit, build_packed, count_sizes

PARTS = ("train", "validation", "test")
MAX_EPOCHS_AHEAD = 16  # whose orders are cached at the start; each rank writes those of later ones as it gets there
MIN_CACHED_ENTRIES = 1 << 20  # documents and samples: a smaller order is built faster than its files are opened


class Samples(Protocol):
    """An endless sequence of samples, int64 arrays.

    Their shape is (seq_length + 1,), or (3, seq_length) if documents are kept apart: see `data.documents`.
    """

    @property
    def tokens_per_sample(self) -> float:
        """The number of tokens of a sample that are not padding, on average over an epoch."""

    def __getitem__(self, sample: int) -> np.ndarray: ...

    def place(self, sample: int) -> str:
        """Return the file and the document in which a sample starts, for error messages."""

    def build_cache(self, first_sample: int, num_samples: int) -> None:
        """Write the cache files of the first orders that contain these samples, or check them if they exist.

        One rank of each node calls this before the others read samples.
        """


class Packing(Protocol):
    """A way to make samples of documents of given lengths, and the orders of its epochs."""

    kind: type[Any]  # of an order: a dataclass of arrays, one of which is `shuffle`
    name: str  # the beginning of the names of the order's files
    needs: str  # the error if the documents do not fill a sample
    samples_per_epoch: int
    tokens_per_sample: float

    def build(self, seed: int, epoch: int) -> Any:
        """Return the order of an epoch."""

    def pieces(self, order: Any, number: int) -> list[tuple[int, slice]]:
        """Return (document, part of its tokens) of each piece of a sample."""

    def sample(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Return the sample of these pieces' tokens."""


class Stream:
    """Stretches of seq_length + 1 tokens of the joined documents, of which neighbours share one."""

    kind, name = EpochOrder, ""
    needs = "are fewer than model.seq_length + 1 = {num_tokens}; lower model.seq_length"

    def __init__(self, lengths: np.ndarray, seq_length: int, masks_documents: bool) -> None:
        self._lengths, self._seq_length, self._masks_documents = lengths, seq_length, masks_documents
        self.samples_per_epoch = max(0, int(lengths.sum(dtype=np.int64)) - 1) // seq_length
        self.tokens_per_sample = float(seq_length)

    def build(self, seed: int, epoch: int) -> EpochOrder:
        return build_epoch(self._lengths, seq_length=self._seq_length, seed=seed, epoch=epoch)

    def pieces(self, order: EpochOrder, number: int) -> list[tuple[int, slice]]:
        # The sample ends with token `stop` of the last document, which is also the first token of the next sample.
        (first, start), (last, stop) = order.sample_starts[number : number + 2].tolist()
        return [
            (document, slice(start if place == first else 0, stop + 1 if place == last else None))
            for place, document in enumerate(order.document_order[first : last + 1].tolist(), first)
        ]

    def sample(self, pieces: list[np.ndarray]) -> np.ndarray:
        return joined_apart(pieces) if self._masks_documents else np.concatenate(pieces, dtype=np.int64)


class BestFit:
    """Whole documents, which are kept apart, and padding; only documents that are longer than a sample are cut."""

    kind, name = PackedOrder, "best_fit_"
    needs = "have no prediction to pack; choose data.packing=stream"

    def __init__(self, lengths: np.ndarray, seq_length: int, masks_documents: bool) -> None:
        assert masks_documents, "a packed document does not continue the one before it"
        self._lengths, self._seq_length = lengths, seq_length
        num_pieces = count_sizes(lengths, seq_length)
        self._bins = best_fit(num_pieces)
        self.samples_per_epoch = sum(group.count for group in self._bins)
        self.tokens_per_sample = int(num_pieces @ np.arange(seq_length + 1)) / max(self.samples_per_epoch, 1)

    def build(self, seed: int, epoch: int) -> PackedOrder:
        return build_packed(self._lengths, self._bins, seq_length=self._seq_length, seed=seed, epoch=epoch)

    def pieces(self, order: PackedOrder, number: int) -> list[tuple[int, slice]]:
        first, stop = order.bin_starts[number : number + 2].tolist()
        return [
            (document, slice(start, start + self._seq_length + 1))
            for document, start in order.pieces[first:stop].tolist()
        ]

    def sample(self, pieces: list[np.ndarray]) -> np.ndarray:
        return packed_apart(pieces, self._seq_length)


PACKINGS: dict[str, type[Stream] | type[BestFit]] = {"stream": Stream, "best_fit": BestFit}


class SampleOptions(TypedDict, total=False):
    """The keyword arguments of `PackedSamples`."""

    seq_length: Required[int]
    seed: Required[int]
    cache_dir: str | Path | None
    checks_cache: bool
    packing: str
    masks_documents: bool


class PackedSamples:
    """The samples of a range of documents of one prefix, of which each epoch has another order.

    `packing` is a name in PACKINGS; with `masks_documents`, samples keep documents apart. Without `checks_cache`,
    cached orders are used without comparing their checksums; `build_cache` compares them.
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
        packing: str = "stream",
        masks_documents: bool = False,
    ) -> None:
        self._dataset = dataset
        self._documents = documents
        self._seq_length = seq_length
        self._seed = seed
        self._checks_cache = checks_cache
        self._cache_dir = Path(cache_dir or f"{dataset.prefix}.cache")
        self.num_tokens = dataset.first_token(documents.stop) - dataset.first_token(documents.start)
        lengths = dataset.sequence_lengths[documents.start : documents.stop]
        self._packing: Packing = PACKINGS[packing](lengths, seq_length, masks_documents)
        self.samples_per_epoch = self._packing.samples_per_epoch
        self.tokens_per_sample = self._packing.tokens_per_sample
        if not self.samples_per_epoch:
            facts = f"{dataset.prefix}: {len(documents)} documents with {self.num_tokens} tokens"
            needs = self._packing.needs.format(num_tokens=seq_length + 1)
            raise DataError(f"{facts} {needs}, change data.split or add data")
        self._current: tuple[int, Any] | None = None

    def __getitem__(self, sample: int) -> np.ndarray:
        order, number = self._find(sample)
        pieces = self._packing.pieces(order, number)
        return self._packing.sample([self._dataset[self._documents[document]][part] for document, part in pieces])

    def place(self, sample: int) -> str:
        order, number = self._find(sample)
        document, _ = self._packing.pieces(order, number)[0]
        return f"{bin_path(self._dataset.prefix)}, document {self._documents[document]}"

    def build_cache(self, first_sample: int, num_samples: int) -> None:
        if not self._has_cache_files:
            return
        last_sample = first_sample + num_samples - 1
        epochs = range(first_sample // self.samples_per_epoch, last_sample // self.samples_per_epoch + 1)
        for epoch in epochs[:MAX_EPOCHS_AHEAD]:
            self._order_of(epoch, checks=True)

    def _find(self, sample: int) -> tuple[Any, int]:
        """Return the order of a sample's epoch, and the number of the sample before it was shuffled."""
        epoch, index = divmod(sample, self.samples_per_epoch)
        current = self._current  # read once, because another thread may replace it
        if current is None or current[0] != epoch:
            current = self._current = (epoch, self._order_of(epoch, self._checks_cache))
        return current[1], int(current[1].shuffle[index])

    @property
    def _has_cache_files(self) -> bool:
        return len(self._documents) + self.samples_per_epoch >= MIN_CACHED_ENTRIES

    def _order_of(self, epoch: int, checks: bool) -> Any:
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
        stem = self._packing.name + recipe.file_stem(epoch)
        return cached_epoch(self._cache_dir, stem, self._packing.kind, lambda: self._build(epoch), checks)

    def _build(self, epoch: int) -> Any:
        return self._packing.build(self._seed, epoch)


def split_documents(num_documents: int, weights: Sequence[float]) -> dict[str, range]:
    """Divide the documents into consecutive ranges for train, validation and test, in proportion to the weights."""
    if len(weights) != len(PARTS) or min(weights) < 0 or sum(weights) <= 0:
        raise DataError(f"data.split={list(weights)} must be three weights, none negative, such as [0.98, 0.01, 0.01]")
    shares = np.cumsum(weights) / sum(weights)
    bounds = [0, *np.rint(shares * num_documents).astype(int).tolist()]
    return {part: range(bounds[i], bounds[i + 1]) for i, part in enumerate(PARTS)}
