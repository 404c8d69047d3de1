"""Disks and files that are full."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let the system refuse what goes beyond, as a full disk does: it takes a part of a write, and refuses the next."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
