"""The settings of offloading, and the memories of a rank."""

from collections.abc import Callable
from enum import Enum
from typing import Annotated, Literal

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind, allocating, tagged
from parallel.validation.errors import MemoryLimitError
from parallel.validation.fields import Positive, Range, checked
from zero.memory.staging import Allocate

Mode = Literal["accelerator", "host", "auto"]
State = Literal["optimizer", "parameters"]
Allocator = Callable[[torch.device, TensorKind], Allocate]


class Placement(Enum):
    """One of the two memories of a rank."""

    ACCELERATOR = "the memory of the device that computes"
    HOST = "host memory, pinned if the device is a GPU"


@checked
class OffloadConfig:
    """The model states that are stored in host memory: none, all of `states`, or those that do not fit elsewhere."""

    mode: Mode = "accelerator"
    """accelerator: no state is offloaded; host: all of `states` are; auto: only those that do not fit on the
    accelerator (Gemini)."""
    states: tuple[State, ...] = ("optimizer", "parameters")
    """The states that may be offloaded. optimizer: owned gradients, master weights and moments, updated by the host;
    parameters: the shards of stage 3, which are copied to the accelerator for every all-gather."""
    accelerator_memory_gb: Annotated[float, Range(above=0, at_most=1e9)] | None = None
    """Limit of the memory that the process may use on the accelerator, in 1e9 bytes. A run that needs more in one of
    its first two steps ends there, and says how much more. null: no limit or, with auto, nine tenths of the device."""
    hidden_dim: Positive = 1024
    """auto: chunk sizes are searched in steps of this many elements; the model's hidden size suits its blocks best."""
    min_chunk_size_m: Annotated[float, Range(above=0, at_most=2**20)] = 32.0
    """auto: the smallest chunk size to try, in 2**20 elements."""
    search_range_m: Annotated[float, Range(0, 2**20)] = 32.0
    """auto: how far above the smallest size to search, in 2**20 elements."""

    @property
    def offloaded_states(self) -> set[State]:
        """The states that may be in host memory."""
        return set() if self.mode == "accelerator" else set(self.states)


NO_OFFLOAD = OffloadConfig()


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
