"""The tracker against bytes known beforehand."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lab.observe.memory_tracker import MemoryTracker
from parallel import memory_kinds
from parallel.memory_kinds import PeakMeter, TensorKind, allocating, highest_peaks, tagged

CPU = torch.device("cpu")


@pytest.fixture(params=["real", "fake"], autouse=True)
def tensor_mode(request):
    with FakeTensorMode() if request.param == "fake" else nullcontext():
        yield


def test_views_share_a_storage_which_is_freed_with_the_last():
    with MemoryTracker(CPU) as tracker:
        whole = torch.empty(1000)
        view = whole.view(10, 100)[3:]
        del whole
        assert tracker.device.total == 4000
        view.add_(1)
        del view
        assert tracker.device.total == 0
        assert tracker.device.peak_total == 4000
        assert tracker.device.num_allocations == {TensorKind.OTHER: 1}


def test_a_storage_may_be_resized():
    with MemoryTracker(CPU) as tracker:
        tensor = tagged(TensorKind.PARAMETERS, torch.empty(100))
        tensor.untyped_storage().resize_(0)
        assert tracker.device.total == 0
        tracker.restart()
        tensor.untyped_storage().resize_(400)
        assert tracker.device.resident[TensorKind.PARAMETERS] == 400
        assert tracker.device.num_allocations[TensorKind.PARAMETERS] == 1
        assert tracker.device.peak_total == 400
    tensor.untyped_storage().resize_(0)  # the tracker has exited
    assert tracker.device.total == 400


def test_a_tag_takes_the_bytes_and_the_allocation_along():
    with MemoryTracker(CPU) as tracker:
        with allocating(TensorKind.ACTIVATIONS):
            with allocating(TensorKind.BUFFERS):
                buffer = torch.empty(10)
            kept, offloaded, activation = torch.empty(20), torch.empty(40), torch.empty(80)
        tagged(TensorKind.CHECKPOINTS, kept[5:])
        tagged(TensorKind.CHECKPOINTS, offloaded, on_host=True)
        assert +tracker.device.resident == {
            TensorKind.BUFFERS: 40,
            TensorKind.CHECKPOINTS: 80,
            TensorKind.ACTIVATIONS: 320,
        }
        assert +tracker.device.num_allocations == {
            TensorKind.BUFFERS: 1,
            TensorKind.CHECKPOINTS: 1,
            TensorKind.ACTIVATIONS: 1,
        }
        assert +tracker.host.resident == {TensorKind.CHECKPOINTS: 160}
        tracker.restart()
        tagged(TensorKind.BUFFERS, activation)
        assert +tracker.device.num_allocations == {}, "it was allocated before"
        assert tracker.host.total == 160
        del buffer, kept, offloaded, activation
        assert tracker.device.total == tracker.host.total == 0


def test_the_peak_is_known_by_kind():
    with MemoryTracker(CPU) as tracker:
        parameter = tagged(TensorKind.PARAMETERS, torch.empty(10))
        with allocating(TensorKind.ACTIVATIONS):
            temporary = torch.empty(100)
        del temporary
        later = tagged(TensorKind.GRADIENTS, torch.empty(50))
        assert +tracker.device.peak == {TensorKind.PARAMETERS: 40, TensorKind.ACTIVATIONS: 400}
        del later
        tracker.restart()
        assert +tracker.device.peak == {TensorKind.PARAMETERS: 40}
        higher = tagged(TensorKind.GRADIENTS, torch.empty(10))
        assert +tracker.device.peak == {TensorKind.PARAMETERS: 40, TensorKind.GRADIENTS: 40}
        del parameter, higher


def test_a_meter_keeps_the_peaks_that_a_restart_takes_from_other_readers(monkeypatch):
    peaks = {"allocated": 70, "reserved": 90}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peaks["reserved"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update(allocated=5, reserved=100))
    monkeypatch.setattr(memory_kinds, "_peaks_before_restart", {})
    device = torch.device("cuda", 0)
    meter = PeakMeter(device)
    meter.restart()
    assert (highest_peaks(device), meter.peak_bytes()) == ((70, 100), 5)
    peaks["allocated"] = 80
    meter.restart()
    assert (highest_peaks(device), meter.peak_bytes()) == ((80, 100), 5)
