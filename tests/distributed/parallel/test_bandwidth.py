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


def num_calls_by_rank(with_pair: bool) -> int:
    """Return how often an action runs that takes 1 s on rank 0 and 3 s on rank 1, by a clock of its own."""
    mesh = Mesh.create(1)
    times: list[float] = []
    clock = mock.Mock(perf_counter=lambda: sum(times))
    of_ranks = {"pair": (mesh.data, 1 - mesh.rank)} if with_pair else {"axis": mesh.data}
    with mock.patch.object(bandwidth, "time", clock):
        bandwidth.measured_seconds(
            lambda: times.append(1.0 + 2 * mesh.rank), torch.device("cpu"), budget=36.0, **of_ranks
        )
    return len(times)


def test_ranks_repeat_an_action_as_often_as_the_mean_of_an_axis_or_the_slower_of_a_pair_allows():
    assert run_ranks(2, num_calls_by_rank, False) == [2 + 18] * 2  # two that estimate, then 36 s of 2 s each
    assert run_ranks(2, num_calls_by_rank, True) == [2 + 12] * 2
