"""The memory that holds activation checkpoints between forward and backward.

    Slab                   | slot 0 | slot 1 | ... | slot n-1 |   allocated once for each size: M_D (paper, section 6.3)
    SeparateAllocations    slot 0 ...  slot 1 .....  slot n-1     allocated in each forward, wherever there is room

Checkpoints are kept long, and the tensors that are allocated between them are freed soon. Without a slab, checkpoints
fragment the memory.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero.memory.allocators import Allocate


@dataclass(frozen=True)
class Slot:
    """The position of one of `count` equal stretches of memory."""

    number: int
    count: int

    def in_ring(self, count: int) -> "Slot":
        """Return the slot to use instead if only `count` slots exist, which are used in turn."""
        return Slot(self.number % count, count)


class SlotMemory(Protocol):
    """A source of memory for checkpoints."""

    def at(self, slot: Slot, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of `numel` elements, not initialized."""


class Slab:
    """A source that returns the same memory every time for the same slot, size and dtype.

    The caller must no longer need the earlier content of the slot.
    """

    def __init__(self, allocate: Allocate):
        self._allocate = allocate
        self._slabs: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def at(self, slot: Slot, numel: int, dtype: torch.dtype) -> Tensor:
        key = slot.count, numel, dtype
        if key not in self._slabs:
            self._slabs[key] = self._allocate(slot.count * numel, dtype).view(slot.count, numel)
        return self._slabs[key][slot.number]


class SeparateAllocations:
    """A source that allocates new memory in each call. It is freed when no reference to the tensor is left."""

    def __init__(self, allocate: Allocate):
        self._allocate = allocate

    def at(self, slot: Slot, numel: int, dtype: torch.dtype) -> Tensor:
        return self._allocate(numel, dtype)
