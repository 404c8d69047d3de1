"""The memory of this node, compared with what the kernel reports elsewhere."""

import math
from pathlib import Path

from parallel.host_memory import available_bytes, physical_bytes, pinned_bytes


def test_available_memory_is_read_in_kibibytes(monkeypatch):
    lines = ["MemTotal: 9 kB", "MemFree: 2 kB", "MemAvailable:    7 kB", "Cached: 3 kB"]
    monkeypatch.setattr(Path, "read_text", lambda _path: "\n".join(lines))
    assert available_bytes() == 7 * 1024
    del lines[2]
    assert available_bytes() == physical_bytes()


def test_pinned_memory_is_rounded_up_to_a_power_of_two_below_a_size():
    sizes = [0, 1, 1000, 1024, 10.4e9]
    assert [pinned_bytes(size, math.inf) for size in sizes] == [0, 1, 1024, 1024, 2**34]
    assert [pinned_bytes(size, 2**20) for size in sizes] == [0, 1, 1024, 1024, 10.4e9]
