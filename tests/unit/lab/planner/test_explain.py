"""Why the neighbours of a layout lose, and the parts of memory and time of a dry run."""

import dataclasses

import pytest

from lab.planner.depth import DepthExtrapolation, Estimate, estimate, extrapolate, shallow_runs
from lab.planner.explain import neighbours, verdict
from lab.planner.layouts import CandidateLayout
from lab.planner.search import Search
from tests.unit.lab.dryrun.test_projection import DGX_2, settings, shallow

PARTS = {"parameters": 15e9, "activations": 5e9}, {"computing": 1.5, "waiting for data": 0.5}
BEST = Estimate(1e9, 20e9, 0.0, 2.0, *PARTS)


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(settings(), dataclasses.replace(DGX_2, median_error=0.1), 400)


def test_neighbours_differ_by_one_step_of_one_setting(search: Search):
    layout = CandidateLayout(16, 2, "keep", 8)
    found = neighbours(layout, search)
    changes = [{name: value for name, value in vars(one).items() if value != getattr(layout, name)} for one in found]
    assert {"tensor_size": 8} in changes
    assert {"stage": 1} in changes
    assert {"stage": 3} in changes
    assert {"store": "selective"} in changes
    assert {"store": "partition"} in changes
    assert {"micro_batch_size": 4} in changes
    assert {"micro_batch_size": 16} in changes
    assert all(len(change) == 1 for change in changes)
    assert {"store": "partition_host"} not in changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"device_peak_bytes": 40e9, "memory": {"parameters": 15e9, "activations": 25e9}},
            "does not fit 33.1 GB: 40.0 GB, of which activations +20 GB",
        ),
        ({"host_peak_bytes": 100e9}, "does not fit the 1536 GB of a host: 1600 GB"),
        (
            {"seconds": 3.0, "time": {"computing": 1.4, "waiting for data": 0.5, "waiting for tensor": 1.1}},
            "slower: 3 s, of which waiting for tensor +1.1 s",
        ),
        (
            {"device_peak_bytes": 22e9, "memory": {"parameters": 17e9, "activations": 5e9}},
            "a tie with less room: 22.0 GB, of which parameters +2 GB; 2 s",
        ),
        (
            {"device_peak_bytes": 16e9, "memory": {"parameters": 15e9, "activations": 1e9}},
            "a tie with as much room or more, which was not verified; give this option to use it: 16.0 GB, of which "
            "activations -4 GB",
        ),
    ],
)
def test_a_neighbour_loses_by_a_part_of_its_memory_or_time(search: Search, changes: dict, expected: str):
    assert verdict(dataclasses.replace(BEST, **changes), BEST, search).startswith(expected)


def test_the_parts_of_a_dry_run_are_its_memory_and_time():
    runs = shallow_runs(shallow("--activations.store=keep"), None, (2, 4))
    for found in (estimate(runs[0], DGX_2), extrapolate(runs, DGX_2).at(5)):
        assert sum(found.memory.values()) == pytest.approx(found.device_peak_bytes)
        assert sum(found.time.values()) == pytest.approx(found.seconds)
        assert found.time["computing"] > 0


def test_a_part_that_one_depth_lacks_is_on_the_line():
    shallow_one, deeper = Estimate(1, 1, 0, 1, {"a": 1.0}), Estimate(2, 3, 0, 2, {"a": 2.0, "b": 1.0})
    assert DepthExtrapolation((1, 2), (shallow_one, deeper)).at(3).memory == {"a": 3.0, "b": 2.0}
