"""An imitation of the caching allocator of torch for GPUs, which shows what fragments of memory cost.

A segment is what the driver gives; it is cut into blocks, and neighbours that are free become one block again:

    | 20 MiB: used | 6 MiB: free | 8 MiB: used | 2 MiB: free |        one segment

Sizes are rounded and blocks chosen as `c10/cuda/CUDACachingAllocator.cpp` does by default: requests of at most 1 MiB
come from segments of 2 MiB, others below 10 MiB from segments of 20 MiB, and larger ones get a segment of their size.
The smallest free block that is large enough is taken, and cut if enough remains. If no block is, and the driver has no
memory left, free segments are given back; if that is not enough, the request is out of memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

SMALL, MEDIUM, MIB = 2**20, 10 * 2**20, 2**20


class OutOfMemory(Exception):
    """The request that failed; `free_bytes` are in blocks too small for it, or not given out by the driver."""

    def __init__(self, num_bytes: int, free_bytes: int):
        super().__init__(f"{num_bytes} bytes cannot be allocated, although {free_bytes} are free")
        self.num_bytes, self.free_bytes = num_bytes, free_bytes


@dataclass(eq=False)
class _Block:
    num_bytes: int
    is_small: bool
    before: "_Block | None" = None  # its neighbours in the segment
    after: "_Block | None" = None


@dataclass(eq=False)
class CachingAllocator:
    """The blocks of a GPU of `capacity` bytes."""

    capacity: float
    reserved: int = 0
    _used: dict[int, _Block] = field(default_factory=dict)
    _free: dict[_Block, None] = field(default_factory=dict)

    def replay(self, storages: Iterable[tuple[int, int]]) -> None:
        """Allocate and release as a `MemoryHistory` says. Raise OutOfMemory."""
        for storage, num_bytes in storages:
            if num_bytes > 0:
                self._used[storage] = self._allocate(num_bytes)
            else:
                self._release(self._used.pop(storage))

    def _allocate(self, num_bytes: int) -> _Block:
        size = -(-num_bytes // 512) * 512
        is_small = size <= SMALL
        fitting = [block for block in self._free if block.is_small is is_small and block.num_bytes >= size]
        block = min(fitting, key=lambda one: one.num_bytes) if fitting else self._new_segment(size, is_small)
        self._free.pop(block, None)
        rest = block.num_bytes - size
        if rest >= 512 if is_small else rest > SMALL:
            other = _Block(rest, is_small, block, block.after)
            if block.after:
                block.after.before = other
            block.after, block.num_bytes = other, size
            self._free[other] = None
        return block

    def _new_segment(self, size: int, is_small: bool) -> _Block:
        segment = 2 * MIB if is_small else 20 * MIB if size < MEDIUM else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + segment > self.capacity:
            for block in [one for one in self._free if not one.before and not one.after]:
                self.reserved -= block.num_bytes
                del self._free[block]
        if self.reserved + segment > self.capacity:
            raise OutOfMemory(size, int(self.capacity) - sum(block.num_bytes for block in self._used.values()))
        self.reserved += segment
        return _Block(segment, is_small)

    def _release(self, block: _Block) -> None:
        for neighbour in (block.before, block.after):
            if neighbour in self._free:
                del self._free[neighbour]
                block.num_bytes += neighbour.num_bytes
                if neighbour is block.before:
                    block.before = neighbour.before
                    if block.before:
                        block.before.after = block
                else:
                    block.after = neighbour.after
                    if block.after:
                        block.after.before = block
        self._free[block] = None
