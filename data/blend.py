"""Samples of several datasets mixed by weight, computed from the sample's number without a stored index.

The weights sum to 1, and the k-th sample of dataset d has the time (k + 0.5) / weight[d]. The blend takes all samples
in order of (time, d). In every prefix of the blend, the samples of a dataset differ from its share by at most half the
number of datasets.

    dataset 0, weight 0.75     0       1       2           3       4       5
    dataset 1, weight 0.25             0                           1
    time                   0 ----- 1 ----- 2 ----- 3 ----- 4 ----- 5 ----- 6 --
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.indexed import IndexedDataset
from data.samples import PackedSamples, Samples, split_documents

BLOCK_SAMPLES = 1024  # located together, because the next request is usually for a neighbour


@dataclass(frozen=True)
class Block:
    """Consecutive samples of the blend: for each its dataset, and its number within that dataset."""

    first: int
    dataset: np.ndarray
    number: np.ndarray


class BlendOrder:
    """The mapping from a sample of the blend to (dataset, number within it). Weights must be positive."""

    def __init__(self, weights: Sequence[float]) -> None:
        total = math.fsum(weights)
        self._weights = np.array([weight / total for weight in weights])
        self._current: Block | None = None

    def locate(self, sample: int) -> tuple[int, int]:
        block = self._current  # read once, because another thread may replace it
        if block is None or not block.first <= sample < block.first + BLOCK_SAMPLES:
            block = self._current = self._block(sample - sample % BLOCK_SAMPLES, BLOCK_SAMPLES)
        return int(block.dataset[sample - block.first]), int(block.number[sample - block.first])

    def counts_before(self, sample: int) -> np.ndarray:
        """Return the number of samples of each dataset that precede a sample of the blend, of shape (datasets,)."""
        counts, dataset, _ = self._merge(sample, sample)
        return counts + np.bincount(dataset[: sample - counts.sum()], minlength=len(counts))

    def _block(self, first: int, num_samples: int) -> Block:
        counts, dataset, number = self._merge(first, first + num_samples)
        block = slice(first - counts.sum(), first - counts.sum() + num_samples)
        return Block(first, dataset[block], number[block])

    def _merge(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute the blend between two times that enclose samples [first, stop).

        Returns the samples of each dataset before the first time, and for each sample between the two times its dataset
        and its number.
        """
        margin = len(self._weights)  # t samples precede time t, plus or minus half the number of datasets
        skipped = self._counts_at(max(first - margin, 0))
        counts = self._counts_at(stop + margin) - skipped
        dataset = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(dataset)) + np.repeat(skipped + counts - np.cumsum(counts), counts)
        order = np.lexsort((dataset, _time(number, self._weights[dataset])))
        return skipped, dataset[order], number[order]

    def _counts_at(self, time: int) -> np.ndarray:
        """Return the number of samples of each dataset before a time. Rounding errors are within the margin."""
        return np.maximum(np.ceil(time * self._weights - 0.5), 0).astype(np.int64)


def _time(number: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return (number + 0.5) / weight


class BlendedSamples:
    """The samples of several datasets in the order of a blend."""

    def __init__(self, datasets: Sequence[Samples], weights: Sequence[float]) -> None:
        self._datasets = datasets
        self._order = BlendOrder(weights)

    def __getitem__(self, sample: int) -> np.ndarray:
        dataset, number = self._order.locate(sample)
        return self._datasets[dataset][number]

    def place(self, sample: int) -> str:
        dataset, number = self._order.locate(sample)
        return self._datasets[dataset].place(number)

    def build_cache(self, first_sample: int, num_samples: int) -> None:
        firsts = self._order.counts_before(first_sample).tolist()
        stops = self._order.counts_before(first_sample + num_samples).tolist()
        for dataset, first, stop in zip(self._datasets, firsts, stops, strict=True):
            dataset.build_cache(first, stop - first)


def open_samples(
    path: str | Sequence[str],
    part: str = "train",
    *,
    split: Sequence[float],
    seq_length: int,
    seed: int,
    cache_dir: str | Path | None = None,
) -> Samples:
    """Open one `part` (train, validation or test) of data.path: PREFIX, WEIGHT:PREFIX, or a list of these.

    Without weights, prefixes are mixed in proportion to their samples. The order files are stored in `cache_dir`, by
    default PREFIX.cache. Raises DataError if a file is missing, a weight is wrong, or a part has fewer than
    seq_length + 1 tokens.
    """
    weights, prefixes = parse_path(path)
    datasets = []
    for prefix in prefixes:
        dataset = IndexedDataset(prefix)
        documents = split_documents(len(dataset), split)[part]
        datasets.append(PackedSamples(dataset, documents, seq_length=seq_length, seed=seed, cache_dir=cache_dir))
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
    weight_text, colon, prefix = entry.partition(":")
    try:
        weight = float(weight_text) if colon else None
    except ValueError:  # the colon is part of a file name
        return None, entry
    if weight is None:
        return None, entry
    if not (math.isfinite(weight) and weight > 0):
        raise DataError(f"data.path={entry} has the weight {weight_text}; weights must be above 0")
    return weight, prefix
