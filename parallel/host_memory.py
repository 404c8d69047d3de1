"""The memory of this node, in bytes, as the operating system reports it."""

import math
import os
from pathlib import Path


def physical_bytes() -> int:
    """Return the size of the node's physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def pinned_bytes(num_bytes: float, largest_rounded: float) -> float:
    """Return the bytes that torch allocates for pinned memory: up to a size, it rounds them up to a power of two."""
    return 2.0 ** math.ceil(math.log2(num_bytes)) if 0 < num_bytes <= largest_rounded else num_bytes


def available_bytes() -> int:
    """Return the memory that can be allocated without swapping; outside Linux, the size of the physical memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return physical_bytes()
