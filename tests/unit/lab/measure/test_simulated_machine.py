"""The preflight measures a simulated machine, whose kernels and messages take the time that a cluster file says."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lab.measure import __main__ as measurement
from lab.measure import bandwidth, device_kernels, reference_step
from lab.measure.cluster import ClusterSpec
from lab.measure.kernel_costs import kernel_seconds
from lab.measure.measured_cluster import Measured, cluster_of
from lab.measure.reference_step import Shape, reference_kernels
from lab.observe.kernel_log import KernelLog
from lab.observe.operation_observer import observe_operations
from parallel.comm_log import CommEvent, CommLog
from parallel.mesh import Axis
from parallel.world import World, imitated_world
from tests.unit.lab.measure.test_measured_cluster import CLUSTER

MACHINE = dataclasses.replace(
    CLUSTER,
    device="cpu",
    num_multiprocessors=1,
    collective_multiprocessors=0,
    product_tile=16,
    splits_products=False,
    tile_overhead=8.0,
    full_precision_tile_overhead=16.0,
    full_precision_share=0.25,
    peak_half_tflops=1e-3,
    gemm_fraction=0.5,
    attention_fraction=0.3,
    full_precision_attention_fraction=0.2,
    attention_overhead=0.0,
    memory_gb_per_second=10.0,
    memory_fraction=1.0,
    kernel_seconds=1e-8,
    launch_seconds=2e-8,
    kernels=(),
)
BYTES_PER_SECOND = {"tensor": 4e9, "data": 1e9, "link": 2e9}
HOP_SECONDS = 1e-4
SHAPES = {"cpu": Shape(2, 16, 2, 8, 2, 32)}
OTHERS = 1.5  # the share of other programs: time passes faster than processor time


class SimulatedMachine:
    """The time that kernels and messages have taken so far; it also stands for the module `time`."""

    def __init__(self) -> None:
        self.computing = self.sending = 0.0
        self._log = KernelLog(lambda: "", is_on_host=lambda _tensor: False)

    def on_operation(self, *operation: Any) -> None:
        self._log.on_operation(*operation)
        self.computing += sum(kernel_seconds(kernel, MACHINE) for kernel in self._log.kernels)
        self._log.kernels.clear()

    def send(self, axis: str, num_bytes: int, num_hops: int) -> None:
        self.sending += num_bytes / BYTES_PER_SECOND[axis] + num_hops * HOP_SECONDS

    def exchange(self, axis: Axis, peer: int, sent: torch.Tensor, received: torch.Tensor) -> None:
        assert peer in range(axis.size)
        before = self.computing
        received.copy_(sent)
        self.computing = before
        self.send("link", sent.nbytes, num_hops=0)

    def thread_time(self) -> float:
        return self.computing

    def perf_counter(self) -> float:
        return OTHERS * self.computing + self.sending


@pytest.fixture(scope="module")
def measured() -> Iterator[tuple[World, Measured]]:
    """The measurements of the first of four ranks on two nodes, whose job has a tensor size of four."""
    machine, record = SimulatedMachine(), CommLog.record

    def timed_record(log: CommLog, op: str, axis: str, size: int, *others: Any) -> CommEvent:
        event = record(log, op, axis, size, *others)
        machine.send(axis, event.wire_bytes, num_hops=(2 if op == "all_reduce" else 1) * (size - 1))
        return event

    sizes = {"NUMELS": {"cpu": (2**10, 2**12, 2**14)}, "LAYERS": {"cpu": ((8, 16, 32), (32, 32, 32), (64, 128, 16))}}
    sizes["LAUNCHES_TOGETHER"] = {"cpu": 3}
    messages = {"MESSAGE_BYTES": (2**10, 2**14), "MOST_REPEATS": 4, "DEVICE_SIZES": {"cpu": (64, 2**20)}}
    with (
        mock.patch.multiple(bandwidth, time=machine, _exchange=machine.exchange, **messages),
        mock.patch.multiple(device_kernels, time=machine, ATTENTIONS={"cpu": ((2, 64, 32), (4, 32, 32))}, **sizes),
        mock.patch.multiple(reference_step, SHAPES=SHAPES),
        mock.patch.object(CommLog, "record", timed_record),
        mock.patch("socket.gethostname", return_value="node0"),
        imitated_world(0, 4, local_size=2, backend="nccl") as world,
        observe_operations(machine),
    ):
        yield world, measurement.measure(world, tensor_size=4)


def test_links_have_the_rates_of_the_machine(measured):
    found = measured[1]
    for link in found.rates.links + found.one_rank_per_node + found.job_mesh:
        size = {(0, 1): 2, (0, 2): 2}.get(link.ranks, 4)
        if link.what == "link":
            assert link.bytes_per_second == pytest.approx(BYTES_PER_SECOND["link"])
            continue
        hops = (2 if link.what == "all_reduce" else 1) * (size - 1)
        sent = hops / size * bandwidth.message_bytes(size)
        seconds = sent / BYTES_PER_SECOND[link.axis] + hops * HOP_SECONDS
        assert link.bytes_per_second == pytest.approx(sent / seconds)
    assert found.hop_seconds == pytest.approx(HOP_SECONDS, rel=1e-3)


def cluster(world: World, measured: Measured) -> ClusterSpec:
    with mock.patch("lab.measure.measured_cluster.physical_bytes", return_value=64 * 2**30):
        return cluster_of([measured], world, "simulated")


def test_a_cluster_file_has_the_rates_of_the_machine(measured):
    found = cluster(*measured)
    rates = [one.peak_half_tflops * one.gemm_fraction for one in (found, MACHINE)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-3)
    assert found.full_precision_share == pytest.approx(MACHINE.full_precision_share, rel=1e-3)
    for name in ("tile_overhead", "full_precision_tile_overhead"):
        assert getattr(found, name) == getattr(MACHINE, name)
    assert found.memory_gb_per_second == pytest.approx(MACHINE.memory_gb_per_second, rel=1e-3)
    for is_half in (False, True):
        rates = [one.peak_half_tflops * one.attention_fraction_of(is_half) for one in (found, MACHINE)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_a_step_take_as_long_as_the_step_has(measured, dtype):
    found = cluster(*measured)
    with mock.patch.multiple(reference_step, SHAPES=SHAPES):
        kernels = reference_kernels(torch.device("cpu"), dtype)
    predicted, simulated = (sum(kernel_seconds(kernel, one) for kernel in kernels) for one in (found, MACHINE))
    assert predicted == pytest.approx(OTHERS * simulated, rel=1e-3)


def of_axes(found: Measured, *axes: str) -> Measured:
    """Return measurements that have links of some axes only."""
    links = [link for link in found.rates.links if link.axis in axes]
    return dataclasses.replace(found, rates=dataclasses.replace(found.rates, links=links), one_rank_per_node=[])


def test_a_rate_that_was_not_measured_is_that_of_the_nearest_kind(measured):
    world, found = measured
    inside, across = (
        next(link.bytes_per_second / 1e9 for link in found.rates.links if link.axis == axis)
        for axis in ("tensor", "data")
    )
    memory = found.rates.device.memory_bytes_per_second / 1e9
    for axes, expected in (
        (("tensor", "data"), (inside, across)),
        (("tensor",), (inside, inside)),
        (("data",), (across, across)),
        ((), (memory, memory)),
    ):
        spec = cluster(world, of_axes(found, *axes))
        rates = spec.intra_node_gb_per_second, spec.node_gb_per_second / world.local_size
        assert (*rates, spec.network_card_gb_per_second) == pytest.approx((*expected, expected[1]))


def test_the_slowest_rank_counts(measured):
    world, found = measured
    slower = replaced(found, hop_seconds=2, reserved_bytes=2)
    rates = ("flops_per_second", "memory_bytes_per_second", "host_bytes_per_second")
    of_rank = dataclasses.replace(
        found.rates,
        links=[replaced(link, bytes_per_second=0.5) for link in found.rates.links],
        device=replaced(found.rates.device, **dict.fromkeys(rates, 0.5), kernel_seconds=2.0),
    )
    between = [replaced(link, bytes_per_second=0.5) for link in found.one_rank_per_node]
    slower = dataclasses.replace(slower, rates=of_rank, one_rank_per_node=between)
    plain = cluster(world, found)
    names = ["intra_node_gb_per_second", "node_gb_per_second", "network_card_gb_per_second"]
    names += ["peak_half_tflops", "memory_gb_per_second", "host_gb_per_second"]
    for ranks in ([found, slower], [slower, found]):
        with mock.patch("lab.measure.measured_cluster.physical_bytes", return_value=64 * 2**30):
            both = cluster_of(ranks, world, "simulated")
        for name in names:
            assert getattr(both, name) == pytest.approx(getattr(plain, name) / 2), name
        for name in ("kernel_seconds", "hop_seconds", "reserved_gb"):
            assert getattr(both, name) == pytest.approx(getattr(plain, name) * 2), name


def replaced(rates: Any, **factors: float) -> Any:
    """Return rates of which some are multiplied."""
    return dataclasses.replace(rates, **{name: getattr(rates, name) * factor for name, factor in factors.items()})


def test_a_cluster_of_gpus_has_their_properties(measured, monkeypatch):
    world, found = measured
    properties = SimpleNamespace(total_memory=80 * 2**30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr("lab.measure.measured_cluster.with_step_factors", lambda spec, *_: spec)
    spec = cluster(dataclasses.replace(world, device=torch.device("cuda", 0)), found)
    assert (spec.device, spec.gpu_memory_gib, spec.num_multiprocessors) == ("gpu", 80, 132)
    assert (spec.product_tile, spec.splits_products, spec.attention_overhead) == (128, True, 350.0)
    assert spec.launch_seconds == found.kernels.launch_seconds


@pytest.mark.parametrize(
    ("figures", "slow"),
    [
        ({}, []),
        ({"node_gb_per_second": 3.9}, []),  # half of the rate of one of two ranks is 0.975, and 0.977 is measured
        ({"node_gb_per_second": 4.0}, ["2"]),
        ({"node_gb_per_second": 8.0, "node_fraction": 0.48}, []),
        ({"node_gb_per_second": 7.6, "gpus_per_node": 8}, []),  # all four ranks on one node
        ({"intra_node_gb_per_second": 7.4, "node_gb_per_second": 4.0}, ["1", "2"]),
    ],
)
def test_links_with_less_than_half_of_the_expected_rate_are_slow(measured, figures, slow):
    world, found = measured
    expected = dataclasses.replace(cluster(world, found), node_gb_per_second=1.0, intra_node_gb_per_second=1.0)
    all_ranks = [
        dataclasses.replace(found, rates=dataclasses.replace(found.rates, rank=rank)) for rank in range(world.size)
    ]
    lines = measurement.describe(all_ranks, dataclasses.replace(expected, **figures))
    groups = {line.removeprefix("slow all_gather: ranks 0, ")[0] for line in lines if "slow all_gather" in line}
    assert sorted(groups) == slow
