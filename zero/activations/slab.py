"""Memory for what waits between forward and backward.

    Slab    | place 0 | place 1 | ... | place n-1 |     one for each size, allocated once: M_D (paper, section 6.3)
    Pieces    place 0 ...  place 1 .....  place n-1     each anew, wherever the allocator finds room

Checkpoints live long and what lies between them does not: without a slab they break the memory into pieces.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero.offload.host_memory import Allocate


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
