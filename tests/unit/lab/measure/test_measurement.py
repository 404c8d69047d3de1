"""Links and devices are measured, each by itself."""

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from lab.measure import __main__ as measurement
from lab.measure import bandwidth
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from parallel.world import World, imitated_world
from tests.unit.parallel.launch.test_preflight import ALIKE


def test_nodes_are_compared_before_anything_is_measured(monkeypatch):
    measured = mock.Mock()
    monkeypatch.setattr(measurement, "start_world", lambda: World(0, 1, 0, 1, torch.device("cpu")))
    monkeypatch.setattr(measurement, "find_facts", lambda _job: dataclasses.replace(ALIKE, disk_error="full"))
    monkeypatch.setattr(measurement, "measure", measured)
    with pytest.raises(ConfigError, match=r"^preflight: n1: /shared/runs cannot be written: full$"):
        measurement.main(["--", "--steps", "7"])
    assert not measured.called


@pytest.mark.parametrize(("tensor_size", "num_meshes"), [(None, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_measured_beside_something_else(monkeypatch, rank, tensor_size, num_meshes):
    happened: list[str] = []

    def note(name: str, found: object) -> Callable[..., object]:
        return lambda *_, **options: happened.append(" ".join([name, *map(str, options.values())])) or found

    for name, found in {"mesh": [], "links": [], "device": None, "sizes": []}.items():
        monkeypatch.setattr(bandwidth, f"measure_{name}", note(name, found))
    monkeypatch.setattr(bandwidth, "latency", note("latency", 1.0))
    monkeypatch.setattr(measurement.DeviceKernels, "measure", note("kernels", None))
    monkeypatch.setattr(Mesh, "barrier", note("barrier", None))
    with imitated_world(rank, 4, 2, "gloo") as world:
        measurement.measure(world, tensor_size)
    links = ["mesh", f"links {rank == 0}", "mesh"][: 1 + num_meshes]
    assert happened == [*links, "barrier", "device", "latency", "latency", "barrier", "sizes", "barrier", "kernels"]
