"""The memory of this node, in bytes, as the operating system reports it."""

import os
from pathlib import Path


def physical_bytes() -> int:
    """Return the size of the node's physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Return the memory that can be allocated without swapping; outside Linux, the size of the physical memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return physical_bytes()
