"""The blend of datasets, compared with a merge of all samples by brute force."""

import heapq
from itertools import count, islice
from math import fsum

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.blend import BLOCK_SAMPLES, BlendedSamples, BlendOrder, Stretch, open_samples, parse_path
from data.errors import DataError

WEIGHTS = st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=9)


def _merged(weights: list[float], num_samples: int) -> list[tuple[int, int]]:
    """Return (dataset, number) of the first samples of all datasets, merged by (time, dataset)."""
    total = fsum(weights)

    def timeline(dataset: int):
        return (((number + 0.5) / (weights[dataset] / total), dataset, number) for number in count())

    merged = heapq.merge(*(timeline(dataset) for dataset in range(len(weights))))
    return [(dataset, number) for _, dataset, number in islice(merged, num_samples)]


@settings(max_examples=60)
@given(WEIGHTS)
@example([1.0, 1.0, 1.0])  # every time is a tie
@example([0.5, 0.25, 0.25])
@example([1e4] + [1e-4] * 8)
def test_the_blend_is_the_merge_of_all_samples_by_time(weights):
    num_samples = 2 * BLOCK_SAMPLES + 7
    order = BlendOrder(weights)
    expected = _merged(weights, num_samples)
    assert [order.locate(i) for i in range(num_samples)] == expected
    for i in (0, 1, BLOCK_SAMPLES, num_samples):
        datasets = [dataset for dataset, _ in expected[:i]]
        assert order.counts_before(i).tolist() == [datasets.count(d) for d in range(len(weights))]


@settings(max_examples=60)
@given(WEIGHTS, st.integers(0, 10**12))
def test_far_into_the_blend_numbers_continue_and_shares_hold(weights, first):
    order = BlendOrder(weights)
    counts = order.counts_before(first)
    assert counts.sum() == first
    assert all(abs(counts - first * np.array(weights) / fsum(weights)) <= len(weights) / 2 + 1e-3)
    for i in range(first, first + 50):
        dataset, number = order.locate(i)
        assert number == counts[dataset]
        counts[dataset] += 1


def test_samples_come_from_the_blended_prefixes(write_corpus):
    small = write_corpus([[1] * 9] * 3, "small")
    large = write_corpus([[2] * 9] * 30, "large")
    settings = {"split": [1, 0, 0], "seq_length": 4, "seed": 1}

    def share_of_small(path, num_samples):
        samples = open_samples(path, **settings)
        return sum(set(samples[i].tolist()) == {1} for i in range(num_samples)) / num_samples

    assert share_of_small([f"0.25:{small}", f"0.75:{large}"], 400) == 0.25
    assert share_of_small([small, large], 73) == pytest.approx(6 / 73)  # 26 / 4 and 269 / 4 samples an epoch
    assert isinstance(open_samples(small, **settings), BlendedSamples)
    assert open_samples([small, large], **settings).place(0).startswith(large)


class Numbered:
    """A dataset whose samples are their own numbers."""

    prefix = fingerprint = ""

    def __getitem__(self, sample: int) -> int:
        return sample


def test_datasets_go_on_where_they_stand_when_weights_change():
    samples = BlendedSamples([Numbered(), Numbered()], [0.5, 0.5])
    unchanged = [samples[i] for i in range(1000)]
    samples.arrange(Stretch(0, (0.5, 0.5), (0, 0)), [(1000, (0.9, 0.1)), (1500, (0, 1))])
    assert [samples[i] for i in range(1000)] == unchanged
    assert [samples.stretch_of(i).taken_before(i) for i in (1000, 1500, 2000)] == [(500, 500), (950, 550), (950, 1050)]
    assert sorted(samples[i] for i in range(2000)) == sorted([*range(950), *range(1050)])
    later = BlendedSamples([Numbered(), Numbered()], [1, 1])
    later.arrange(samples.stretch_of(1400))
    assert [later[i] for i in range(1000, 1500)] == [samples[i] for i in range(1000, 1500)]


def test_the_cache_of_a_blend_is_built_by_each_dataset_for_its_own_samples():
    class Recorder:
        def build_cache(self, first_sample, num_samples):
            self.asked = (first_sample, num_samples)

    datasets = [Recorder(), Recorder()]
    BlendedSamples(datasets, [3, 1]).build_cache(400, 80)
    assert [dataset.asked for dataset in datasets] == [(300, 60), (100, 20)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b", ([], ["/a/b"])),
        ("2:/a/b", ([2.0], ["/a/b"])),
        ("/odd:name", ([], ["/odd:name"])),
        (["0.7:/a", "0.3:/b"], ([0.7, 0.3], ["/a", "/b"])),
        (["/a", "/b"], ([], ["/a", "/b"])),
    ],
)
def test_the_path_setting_is_prefixes_with_all_or_no_weights(path, expected):
    assert parse_path(path) == expected


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (["0.7:/a", "/b"], "2 entries, 1 with a weight; give all a weight or none"),
        ([], "0 entries"),
        ("0:/a", "data.path=0:/a has the weight 0; weights must be above 0"),
        ("-1:/a", "weight -1"),
        ("nan:/a", "weight nan"),
        (["1e308:/a", "1e308:/b"], "weight 1e308; weights must be above 0, and at most 1e"),
        ("inf:/a", "weight inf"),
    ],
)
def test_a_wrong_path_setting_is_reported(path, message):
    with pytest.raises(DataError, match=message):
        parse_path(path)
