"""Collectives are measured with messages that grow with the number of ranks."""

import itertools
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lab.measure import bandwidth
from parallel.mesh import Axis, Mesh
from parallel.world import imitated_world
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


@pytest.mark.parametrize(("seconds", "num_repeats"), [(0.0, 50), (0.1, 10), (0.4, 3), (100.0, 3)])
def test_an_action_is_repeated_for_its_time_but_neither_seldom_nor_for_ever(seconds, num_repeats):
    calls: list[float] = []
    clock = mock.Mock(thread_time=lambda: sum(calls))
    with mock.patch.object(bandwidth, "time", clock):
        bandwidth.measured_seconds(lambda: calls.append(seconds), torch.device("cpu"), budget=1.05)
    assert len(calls) == 2 + num_repeats


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_each_link_of_a_ring_is_measured_by_both_of_its_ranks_and_told_by_one(size: int):
    told, exchanged, num_barriers = [], [], []

    def seconds(exchange: partial, _device: torch.device, pair: tuple[Axis, int]) -> float:
        assert exchange.args[:2] == pair
        exchanged.append((pair[0].rank, pair[1]))
        return 2.0

    for rank in range(size):
        with imitated_world(rank, size, size, "gloo"), mock.patch.object(dist, "barrier") as barrier:
            axis = Mesh.create(1).data
            with mock.patch.object(bandwidth, "measured_seconds", seconds):
                told += bandwidth.measure_links(axis, torch.device("cpu"))
                num_barriers.append(barrier.call_count)
                assert bandwidth.measure_links(axis, torch.device("cpu"), takes_part=False) == []
                assert barrier.call_count == 2 * num_barriers[-1]
    ring = sorted({tuple(sorted((rank, (rank + 1) % size))) for rank in range(size)} if size > 1 else [])
    assert sorted(rate.ranks for rate in told) == ring
    assert {rate.bytes_per_second for rate in told} <= {bandwidth.LINK_BYTES / 2.0}
    assert sorted(exchanged) == sorted(pair for one, other in ring for pair in ((one, other), (other, one)))
    assert len(set(num_barriers)) == 1


def test_all_ranks_wait_before_each_measurement_of_a_mesh(monkeypatch):
    happened: list[str] = []
    monkeypatch.setattr(Mesh, "barrier", lambda _mesh: happened.append("barrier"))
    for what in ("axis", "links"):
        monkeypatch.setattr(
            bandwidth, f"measure_{what}", lambda axis, _device, what=what: happened.append(f"{what} {axis.name}") or []
        )
    with imitated_world(0, 4, 2, "gloo"):
        bandwidth.measure_mesh(Mesh.create(2), torch.device("cpu"))
    each = [f"{what} {axis}" for axis in ("tensor", "data") for what in ("axis", "links")]
    assert happened == [event for what in each for event in ("barrier", what)]


def test_the_first_rank_of_a_group_tells_its_rates():
    for rank in range(2):
        with imitated_world(rank, 2, 2, "gloo"), mock.patch.object(bandwidth, "SECONDS_EACH", 0.0):
            rates = bandwidth.measure_axis(Mesh.create(1).data, torch.device("cpu"))
        assert [rate.what for rate in rates] == ["all_reduce", "all_gather", "reduce_scatter"] * (rank == 0)
    alone = Axis.trivial("data")
    assert bandwidth.measure_axis(alone, torch.device("cpu")) == []
    assert bandwidth.measure_sizes(alone, torch.device("cpu")) == []
    assert bandwidth.latency(alone, torch.device("cpu")) == 0.0


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
