"""Packing by best fit: the bins, the orders of epochs, and the samples."""

import bisect
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.documents import NOT_COUNTED
from data.errors import DataError
from data.indexed import IndexedDataset
from data.packing import BestFit, best_fit, count_sizes
from data.samples import PackedSamples, SampleOptions

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(lambda lengths: max(lengths) > 1)


def slow_best_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """Pack one size at a time: into the bin with the least room that suffices, the newest of these."""
    bins: list[tuple[int, list[int]]] = []  # (room, contents), sorted by room
    for size in sorted(sizes, reverse=True):
        place = bisect.bisect_left(bins, size, key=lambda one: one[0])
        room, contents = bins.pop(place) if place < len(bins) else (capacity, [])
        bisect.insort_left(bins, (room - size, [*contents, size]), key=lambda one: one[0])
    return [contents for _, contents in bins]


def packed_sizes(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    bins = best_fit(count_sizes(lengths, capacity))
    return [group.sizes.tolist() for group in bins for _ in range(group.count)]


@given(LENGTHS, st.integers(1, 17))
def test_bins_of_counted_sizes_are_those_of_packing_one_piece_at_a_time(lengths, capacity):
    sizes = []
    for length in lengths:
        whole, rest = divmod(max(length - 1, 0), capacity)
        sizes += [capacity] * whole + [rest] * bool(rest)
    found, expected = packed_sizes(np.array(lengths), capacity), slow_best_fit(sizes, capacity)
    assert sorted(size for sizes in found for size in sizes) == sorted(sizes)
    assert max(map(sum, found)) <= capacity
    assert len(found) == len(expected)
    assert sorted(map(sum, found)) == sorted(map(sum, expected))


@pytest.mark.parametrize("seq_length", [512, 2048, 8192])
def test_less_than_a_hundredth_of_the_positions_is_padding(seq_length):
    lengths = np.random.default_rng(1).lognormal(6, 1.2, 20_000).astype(np.int32)
    num_bins = sum(group.count for group in best_fit(count_sizes(lengths, seq_length)))
    assert 1 - np.maximum(lengths - 1, 0).sum() / (num_bins * seq_length) < 0.002


def build(lengths: list[int], seq_length: int, seed: int = 5, epoch: int = 0):
    return BestFit(np.array(lengths), seq_length, masks_documents=True).build(seed, epoch)


@given(LENGTHS, st.integers(1, 17), st.integers(0, 2))
def test_every_prediction_is_in_one_sample_of_an_epoch(lengths, seq_length, epoch):
    order = build(lengths, seq_length, epoch=epoch)
    pieces = sorted(map(tuple, order.pieces.tolist()))
    assert pieces == [(n, start) for n, length in enumerate(lengths) for start in range(0, length - 1, seq_length)]
    sizes = [min(seq_length, lengths[document] - 1 - start) for document, start in order.pieces.tolist()]
    bounds = order.bin_starts.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(sizes))
    assert all(0 < sum(sizes[first:stop]) <= seq_length for first, stop in pairwise(bounds))
    assert sorted(order.shuffle.tolist()) == list(range(len(bounds) - 1))


def test_seeds_and_epochs_have_different_orders():
    lengths = np.random.default_rng(0).integers(1, 40, 200).tolist()
    orders = [build(lengths, 32, seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len({order.pieces.tobytes() for order in orders}) == len({order.shuffle.tobytes() for order in orders}) == 4
    assert len({order.bin_starts.tobytes() for order in orders}) == 1
    assert build(lengths, 32, 2, 1).pieces.tobytes() == orders[3].pieces.tobytes()


def packed(prefix: str) -> PackedSamples:
    dataset = IndexedDataset(prefix)
    options = SampleOptions(seq_length=16, seed=3, packing="best_fit", masks_documents=True)
    return PackedSamples(dataset, range(2, len(dataset)), options)


def test_an_epoch_shows_every_token_but_the_first_of_a_document_once_as_a_target(counting_corpus):
    """A token of the corpus is its own place in the file."""
    samples, dataset = packed(counting_corpus), IndexedDataset(counting_corpus)
    documents = [dataset[number].tolist() for number in range(2, len(dataset))]
    for epoch in range(2):
        rows = [samples[epoch * samples.samples_per_epoch + i] for i in range(samples.samples_per_epoch)]
        tokens, targets, positions = np.concatenate(rows, axis=1)
        assert {(row.shape, row.dtype) for row in rows} == {((3, 16), np.dtype(np.int64))}
        is_counted = targets != NOT_COUNTED
        assert (targets - tokens)[is_counted].tolist() == [1] * is_counted.sum()
        assert sorted(targets[is_counted]) == [token for tokens in documents for token in tokens[1:]]
        assert samples.tokens_per_sample * samples.samples_per_epoch == is_counted.sum()
        assert not tokens[~is_counted].any()
        starts = set(tokens[(positions == 0) & is_counted])
        assert {tokens[0] for tokens in documents if len(tokens) > 1} <= starts


def test_the_cache_holds_the_order_that_is_built(counting_corpus, monkeypatch):
    built = packed(counting_corpus)
    monkeypatch.setattr("data.samples.MIN_CACHED_ENTRIES", 1)
    written, read = packed(counting_corpus), packed(counting_corpus)
    written.build_cache(0, 2 * written.samples_per_epoch)
    monkeypatch.setattr(BestFit, "build", lambda *_: pytest.fail("must not build"))
    for i in range(2 * built.samples_per_epoch):
        assert np.array_equal(read[i], built[i])


def test_the_tokens_of_a_single_sample_are_its_predictions(write_corpus):
    samples = packed(write_corpus([[1, 2], [3, 4], [5, 6, 7], [8, 9]]))
    assert (samples.samples_per_epoch, samples.tokens_per_sample) == (1, 3)


def test_documents_without_a_prediction_are_reported(write_corpus):
    with pytest.raises(DataError, match=r"2 documents with 2 tokens have no prediction to pack; .* or add data"):
        packed(write_corpus([[1, 2], [3, 4], [5], [6]]))
