"""The reported peak of memory is that of the whole run."""

import torch

from gpt.monitor.metrics import peak_flops, peak_memory
from gpt.settings.training import TrainSettings


def test_peaks_before_torchs_were_reset_count(monkeypatch):
    for name, value in {"max_memory_allocated": 50, "max_memory_reserved": 60, "memory_reserved": 9}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    found = peak_memory(torch.device("cuda", 0), earlier=(70, 10))
    assert (found["peak_allocated_bytes"], found["peak_reserved_bytes"]) == (70, 60)
    assert peak_memory(torch.device("cuda", 0))["peak_allocated_bytes"] == 50


def test_the_peak_of_a_device_is_that_of_the_settings_or_that_of_its_name():
    cpu = torch.device("cpu")
    assert peak_flops(TrainSettings(peak_tflops=2.5), cpu) == 2.5e12
    assert peak_flops(TrainSettings(), cpu) is None
