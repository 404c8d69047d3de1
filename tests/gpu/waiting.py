"""A context in which the host may not wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise RuntimeError if an operation in here makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
