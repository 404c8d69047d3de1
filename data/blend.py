"""Samples of several datasets mixed by weight. The order is computed from the sample's number, without a stored index.

If weights change, a stretch with an order of its own begins, in which each dataset goes on where it stands.

The weights sum to 1, and sample k of dataset d has the time (k + 0.5) / weight[d]. The blend is all samples in the
order of (time, d). Among the first n samples of the blend, the number from dataset d differs from n x weight[d] by at
most half the number of datasets.

    dataset 0, weight 0.75     0       1       2           3       4       5
    dataset 1, weight 0.25             0                           1
    time                   0 ----- 1 ----- 2 ----- 3 ----- 4 ----- 5 ----- 6 --
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from data.errors import DataError
from data.indexed import IndexedDataset, check_index
from data.samples import PackedSamples, SampleOptions, split_documents

MAX_WEIGHT = 1e30  # so that sums of weights are finite
BLOCK_SAMPLES = 1024  # computed at once, because the next sample requested is usually a neighbour


class BlendOrder:
    """The mapping from a sample of the blend to (dataset, number within it). A dataset of weight 0 has no samples."""

    def __init__(self, weights: Sequence[float]) -> None:
        total = math.fsum(weights)
        self._weights = np.array([weight / total for weight in weights])
        self._block = lru_cache(maxsize=1)(self._locate_block)

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (dataset, number within it) of a sample of the blend."""
        block, place = divmod(sample, BLOCK_SAMPLES)
        dataset, number = self._block(block)
        return int(dataset[place]), int(number[place])

    def counts_before(self, sample: int) -> np.ndarray:
        """Return the number of samples of each dataset that precede a sample of the blend, of shape (datasets,)."""
        skipped, dataset, _ = self._merge(sample, sample)
        return skipped + np.bincount(dataset[: sample - skipped.sum()], minlength=len(skipped))

    def _locate_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each sample of a block, and its number within it."""
        first = block * BLOCK_SAMPLES
        skipped, dataset, number = self._merge(first, first + BLOCK_SAMPLES)
        start = first - skipped.sum()
        return dataset[start : start + BLOCK_SAMPLES], number[start : start + BLOCK_SAMPLES]

    def _merge(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute a stretch of the blend that contains samples [first, stop), and possibly some before and after them.

        Returns the number of samples of each dataset before the stretch, (datasets,), and for each sample of the
        stretch its dataset and its number within it.
        """
        # About t samples of the blend precede time t, with an error of at most half the number of datasets. So the
        # times (first - margin, stop + margin) enclose the samples.
        margin = len(self._weights)
        skipped = self._counts_at(first - margin)
        counts = self._counts_at(stop + margin) - skipped
        dataset = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(dataset)) + np.repeat(skipped + counts - np.cumsum(counts), counts)
        order = np.lexsort((dataset, (number + 0.5) / self._weights[dataset]))
        return skipped, dataset[order], number[order]

    def _counts_at(self, time: int) -> np.ndarray:
        """Return the number of samples of each dataset before a time. The margin covers rounding errors."""
        return np.maximum(np.ceil(time * self._weights - 0.5), 0).astype(np.int64)


@dataclass(frozen=True)
class Stretch:
    """The samples of a blend from `first_sample` on, before which `taken` samples of each dataset have been used."""

    first_sample: int
    weights: tuple[float, ...]
    taken: tuple[int, ...]

    @cached_property
    def _order(self) -> BlendOrder:
        return BlendOrder(self.weights)

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (dataset, number within it) of a sample of the blend."""
        dataset, number = self._order.locate(sample - self.first_sample)
        return dataset, self.taken[dataset] + number

    def taken_before(self, sample: int) -> tuple[int, ...]:
        """Return how many samples of each dataset precede a sample of the blend."""
        counts = self._order.counts_before(sample - self.first_sample).tolist()
        return tuple(taken + count for taken, count in zip(self.taken, counts, strict=True))


class BlendedSamples:
    """The samples of several datasets in the order of a blend, with the methods of `PackedSamples`.

    `weights` are those of data.path, which hold from sample 0 on until `arrange` is called.
    """

    def __init__(self, datasets: Sequence[PackedSamples], weights: Sequence[float]) -> None:
        self._datasets, self.weights = datasets, tuple(weights)
        self.arrange(Stretch(0, self.weights, (0,) * len(datasets)))

    def arrange(self, first: Stretch, later: Sequence[tuple[int, Sequence[float]]] = ()) -> None:
        """Blend as `first` says, and with other weights from each (sample, weights) on.

        After a change each dataset goes on where it stands. Samples before `first` cannot be read any more.
        """
        self._stretches = [first]
        for sample, weights in later:
            taken = self._stretches[-1].taken_before(sample)
            self._stretches.append(Stretch(sample, tuple(weights), taken))

    def stretch_of(self, sample: int) -> Stretch:
        """Return the stretch of a sample."""
        number = bisect.bisect_right(self._stretches, sample, key=lambda stretch: stretch.first_sample)
        assert number, f"sample {sample} is before {self._stretches[0].first_sample}"
        return self._stretches[number - 1]

    @property
    def tokens_per_sample(self) -> float:
        weights = self._stretches[0].weights
        pairs = zip(weights, self._datasets, strict=True)
        return math.fsum(weight * dataset.tokens_per_sample for weight, dataset in pairs) / math.fsum(weights)

    @property
    def fingerprints(self) -> list[tuple[str, str]]:
        """The prefix and the fingerprint of each dataset."""
        return [(dataset.prefix, dataset.fingerprint) for dataset in self._datasets]

    def __getitem__(self, sample: int) -> np.ndarray:
        dataset, number = self.stretch_of(sample).locate(sample)
        return self._datasets[dataset][number]

    def place(self, sample: int) -> str:
        dataset, number = self.stretch_of(sample).locate(sample)
        return self._datasets[dataset].place(number)

    def build_cache(self, first_sample: int, num_samples: int) -> None:
        samples = first_sample, first_sample + num_samples
        firsts, stops = (self.stretch_of(sample).taken_before(sample) for sample in samples)
        for dataset, first, stop in zip(self._datasets, firsts, stops, strict=True):
            if stop > first:
                dataset.build_cache(first, stop - first)


def open_samples(
    path: str | Sequence[str],
    part: str = "train",
    *,
    split: Sequence[float],
    checks_index: bool = True,
    **options: Any,
) -> BlendedSamples:
    """Open one `part` (train, validation or test) of data.path: PREFIX, WEIGHT:PREFIX, or a list of these.

    Without weights, prefixes are mixed in proportion to their numbers of samples. The options are the fields of
    `SampleOptions`; orders of samples are cached in `cache_dir`, by default PREFIX.cache. Raises DataError if a file is
    missing or damaged, a weight is not positive, or a prefix has too few tokens in this part. Without `checks_index`,
    the indices are not read as a whole, and without `checks_cache` the cached orders are not: one rank of each node
    does this for the others.
    """
    weights, prefixes = parse_path(path)
    datasets = []
    for prefix in prefixes:
        dataset = IndexedDataset(prefix)
        if checks_index:
            check_index(dataset)
        documents = split_documents(len(dataset), split)[part]
        if not documents:
            raise DataError(
                f"{prefix} has {len(dataset)} documents, of which data.split={list(split)} leaves 0 for {part}; change "
                "data.split, or divide the documents"
            )
        datasets.append(PackedSamples(dataset, documents, SampleOptions(**options)))
    return BlendedSamples(datasets, weights or [dataset.samples_per_epoch for dataset in datasets])


def parse_path(path: str | Sequence[str]) -> tuple[list[float], list[str]]:
    """Return the weights and the prefixes of data.path. The list of weights is empty if no entry has one."""
    entries = [path] if isinstance(path, str) else list(path)
    parsed = [_parse_entry(entry) for entry in entries]
    prefixes = [prefix for _, prefix in parsed]
    weights = [weight for weight, _ in parsed if weight is not None]
    if not entries or len(weights) not in (0, len(entries)):
        raise DataError(
            f"data.path has {len(entries)} entries, {len(weights)} with a weight; give all a weight or none"
        )
    return weights, prefixes


def _parse_entry(entry: str) -> tuple[float | None, str]:
    """Return (WEIGHT, PREFIX) of one entry of data.path; the weight is None if the entry has none."""
    weight_text, colon, prefix = entry.partition(":")
    if not colon:
        return None, entry
    try:
        weight = float(weight_text)
    except ValueError:  # the colon is part of a file name
        return None, entry
    if not 0 < weight <= MAX_WEIGHT:
        raise DataError(
            f"data.path={entry} has the weight {weight_text}; weights must be above 0, and at most {MAX_WEIGHT:g}"
        )
    return weight, prefix
