"""Memory for what waits between forward and backward.

    Slab    | place 0 | place 1 | ... | place n-1 |     one for each size, allocated once: M_D (paper, section 6.3)
    Pieces    place 0 ...  place 1 .....  place n-1     each anew, wherever the allocator finds room

Checkpoints live long and what lies between them does not: without a slab they break the memory into pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallel.errors import ConfigError
from parallel.instruments.memory_tracker import TensorKind, tagged

Allocate = Callable[[int, torch.dtype], Tensor]  # (elements, type) -> flat memory


@dataclass(frozen=True)
class Place:
    """Number `number` of `count` equal ones in a row."""

    number: int
    count: int

    def on_ring(self, count: int) -> "Place":
        """Its place where only `count` are there at a time."""
        return Place(self.number % count, count)


class Memory(Protocol):
    def at(self, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        """Flat memory to write to."""


class Slab:
    """The same memory for the same place and size every time: whoever had it must be done with it."""

    def __init__(self, allocate: Allocate):
        self._allocate = allocate
        self._slabs: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def at(self, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        key = place.count, numel, dtype
        if key not in self._slabs:
            self._slabs[key] = self._allocate(place.count * numel, dtype).view(place.count, numel)
        return self._slabs[key][place.number]


class Pieces:
    """Memory of its own for every caller, which goes when the caller lets it go."""

    def __init__(self, allocate: Allocate):
        self._allocate = allocate

    def at(self, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        return self._allocate(numel, dtype)


def on_device(device: torch.device, kind: TensorKind) -> Allocate:
    return lambda numel, dtype: tagged(kind, torch.empty(numel, dtype=dtype, device=device))


def on_host_of(device: torch.device, kind: TensorKind) -> Allocate:
    """Pinned where the device is a GPU, which then copies beside its computation. Raises ConfigError where there is
    not as much."""

    def allocate(numel: int, dtype: torch.dtype) -> Tensor:
        try:
            tensor = torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")
        except RuntimeError as error:
            raise ConfigError(
                f"{numel * dtype.itemsize / 1e9:,.3g} GB of host memory for {kind} could not be had: "
                f"{str(error).splitlines()[0]}; offload less, or allow the process more (pinned) memory"
            ) from error
        return tagged(kind, tensor, on_host=True)

    return allocate
