"""The memory that holds activation checkpoints between forward and backward.

    slab        | slot 0 | slot 1 | ... | slot n-1 |   allocated once for each size: M_D (paper, section 6.3)
    separate    slot 0 ...  slot 1 .....  slot n-1     allocated in each forward, wherever there is room

Checkpoints are kept long, and the tensors that are allocated between them are freed soon. Without a slab, checkpoints
fragment the memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zero.memory.allocators import Allocate


@dataclass(frozen=True)
class Slot:
    """The position of one of `count` equal ranges of memory."""

    number: int
    count: int

    def in_ring(self, count: int) -> "Slot":
        """Return the slot to use instead if only `count` slots exist, which are used in turn."""
        return Slot(self.number % count, count)


class SlotMemory:
    """A source of memory for checkpoints.

    If it defragments, it returns the same memory every time for the same slot, size and dtype, and the caller must no
    longer need the earlier content of the slot. Else it allocates new memory in each call, which is freed when no
    reference to the tensor is left.
    """

    def __init__(self, allocate: Allocate, defragments: bool):
        self._allocate, self._defragments = allocate, defragments
        self._slabs: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def at(self, slot: Slot, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of `numel` elements, not initialized."""
        if not self._defragments:
            return self._allocate(numel, dtype)
        key = slot.count, numel, dtype
        if key not in self._slabs:
            self._slabs[key] = self._allocate(slot.count * numel, dtype).view(slot.count, numel)
        return self._slabs[key][slot.number]
