"""Collectives are measured with messages that grow with the number of ranks."""

import itertools
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from parallel.launch import bandwidth
from parallel.mesh import Mesh
from tests.ranks import run_ranks


def measured_bytes() -> int:
    """The size of the last message, if each rank's part should have 3 MiB and a link is measured by less."""
    mesh = Mesh.create(1)
    small = {"SHARD_BYTES": 3 * 2**20, "LINK_BYTES": 2**10, "SECONDS_EACH": 0.0}
    with mock.patch.multiple(bandwidth, **small):
        bandwidth.measure_axis(mesh.data, torch.device("cpu"))
    return mesh.log.last.message_bytes


def test_each_ranks_part_of_a_measured_collective_has_a_smallest_size():
    assert run_ranks(2, measured_bytes) == [6 * 2**20] * 2
    assert bandwidth.message_bytes(400) == 400 * 2**20
    assert bandwidth.message_bytes(2) == 8 * 2**20


@pytest.mark.parametrize("size", range(3, 10))
def test_three_sets_of_disjoint_pairs_are_all_links_of_a_ring(size: int):
    sets = [bandwidth._pairs(size, number) for number in range(3)]
    for pairs in sets:
        ends = [rank for pair in pairs for rank in pair]
        assert len(set(ends)) == len(ends), "no rank is in two pairs of a set"
    assert sorted(pair for pairs in sets for pair in pairs) == [(rank, (rank + 1) % size) for rank in range(size)]
    assert bandwidth._pairs(2, 0) == [(0, 1)]


def test_a_computation_before_a_measured_action_does_not_count_and_waits_have_their_mean():
    now, seconds = 0.0, itertools.cycle([1.0, 1.0, 7.0])

    def advance(by: float) -> None:
        nonlocal now
        now += by

    def measured(before: Callable[[], object] | None) -> float:
        return bandwidth.measured_seconds(
            lambda: advance(next(seconds)), torch.device("cpu"), budget=21.0, counts_waiting=True, before=before
        )

    with mock.patch.object(bandwidth.time, "perf_counter", side_effect=lambda: now):
        assert measured(None) == 1.0
        seconds = itertools.cycle([1.0, 1.0, 7.0])  # two that estimate, then 21: 7, 1, 1, ...
        assert measured(lambda: advance(100.0)) == 3.0
