"""The reported peak of memory is that of the whole run."""

import resource
from types import SimpleNamespace

import torch

from gpt.monitor.metrics import peak_flops, peak_memory
from gpt.settings.training import TrainSettings


def test_the_peak_on_a_gpu_is_that_of_the_allocator(monkeypatch):
    for name, value in {"max_memory_allocated": 50, "max_memory_reserved": 60, "memory_reserved": 9}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    expected = {"peak_allocated_bytes": 50, "peak_reserved_bytes": 60}
    assert peak_memory(torch.device("cuda", 0)) == expected | {"reserved_unused_bytes": 5, "allocation_retries": 0}


def test_the_peak_on_a_cpu_is_that_of_the_process(monkeypatch):
    monkeypatch.setattr(resource, "getrusage", lambda _who: SimpleNamespace(ru_maxrss=3))  # in KiB
    expected = {"peak_allocated_bytes": 3072, "peak_reserved_bytes": 3072}
    assert peak_memory(torch.device("cpu")) == expected | {"reserved_unused_bytes": 0, "allocation_retries": 0}


def test_the_peak_of_a_device_is_that_of_the_settings_or_that_of_its_name():
    cpu = torch.device("cpu")
    assert peak_flops(TrainSettings(peak_tflops=2.5), cpu) == 2.5e12
    assert peak_flops(TrainSettings(), cpu) is None
