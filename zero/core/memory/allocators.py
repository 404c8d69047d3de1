"""Allocators of memory on the accelerator and on the host."""

from collections.abc import Callable

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind, allocating, tagged
from parallel.validation.errors import MemoryLimitError

Allocate = Callable[[int, torch.dtype], Tensor]  # (number of elements, dtype) -> flat tensor, not initialized
Allocator = Callable[[torch.device, TensorKind], Allocate]


def device_allocator(device: torch.device, kind: TensorKind) -> Allocate:
    """Return an allocator of memory on `device`."""
    return lambda numel, dtype: tagged(kind, torch.empty(numel, dtype=dtype, device=device))


def host_allocator(device: torch.device, kind: TensorKind) -> Allocate:
    """Return an allocator of host memory, pinned if `device` is a GPU so that copies run beside the computation.

    The allocator raises MemoryLimitError if the host does not have as much memory as is asked for.
    """

    def allocate(numel: int, dtype: torch.dtype) -> Tensor:
        try:
            with allocating(kind, on_host=True):
                return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")
        except RuntimeError as error:
            raise MemoryLimitError(
                f"{numel * dtype.itemsize / 1e9:,.3g} GB of host memory for {kind} could not be allocated: "
                f"{str(error).splitlines()[0]}; offload less, or allow the process more (pinned) memory"
            ) from error

    return allocate
