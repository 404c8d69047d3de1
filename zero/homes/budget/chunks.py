"""Chunks (Gemini): the search for their size, and the choice of those that stay in a memory that cannot hold them all.

A chunk is Gemini's name for a bucket. If all chunks have one size, a memory of equal slots holds any of them. The last
chunk of a unit is shorter, and a parameter may have elements in several chunks, so that only alignment is wasted.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from zero.core.partition.layout import round_up
from zero.settings.config import OffloadConfig

MEBI = 2**20
NUM_ROUNDS = 3  # the first begins with nothing held; the third repeats what the second has led to

Chunk = TypeVar("Chunk", bound=Hashable)


def search_chunk_size(unit_numels: Iterable[int], config: OffloadConfig, grain: int) -> tuple[int, int]:
    """Return the size in the configured range that leaves the fewest elements of its slots empty, and their number.

    Of equals, it is the largest. Every chunk has a multiple of `grain` elements: `ZeroConfig.grain`.
    """
    counted = Counter(round_up(numel, grain) for numel in unit_numels if numel)
    if not counted:
        return grain, 0
    smallest = max(1, round(config.min_chunk_size_m * MEBI))
    # One chunk holds any unit from the largest unit on; and steps below the grain are rounded up to it.
    largest = min(smallest + round(config.search_range_m * MEBI), max(smallest, max(counted)) + config.hidden_dim)
    candidates = np.arange(smallest, largest + 1, max(config.hidden_dim, grain), dtype=np.int64)
    candidates = np.unique(-(-candidates // grain) * grain)
    unfilled = np.zeros_like(candidates)
    for numel, count in counted.items():
        unfilled += count * (-numel % candidates)
    best = len(candidates) - 1 - int(np.argmin(unfilled[::-1]))
    return int(candidates[best]), int(unfilled[best])


class Cycle(Generic[Chunk]):
    """The chunks, or shards of them, that are used at each position of a round, such as a step, that repeats."""

    def __init__(self, uses: Sequence[Collection[Chunk]]):
        self._uses, self._length = uses, len(uses)
        self._positions: defaultdict[Chunk, list[int]] = defaultdict(list)
        for position, chunks in enumerate(uses):
            for chunk in chunks:
                self._positions[chunk].append(position)

    def next_use(self, chunk: Chunk, position: int) -> float:
        """Return the number of positions from this one to the chunk's next use, which may be in the next round."""
        positions = self._positions.get(chunk)
        if not positions:
            return math.inf
        following = bisect_right(positions, position)
        if following < len(positions):
            return positions[following] - position
        return positions[0] + self._length - position

    def choose_kept(
        self, chunks: Iterable[Chunk], position: int, room_bytes: float, num_bytes: Callable[[Chunk], int]
    ) -> list[Chunk]:
        """Return those of `chunks` that are used soonest after this position, as many as there is room for.

        If all sizes are equal, no other choice fetches fewer chunks (Belady 1966).
        """
        kept = []
        for chunk in sorted(chunks, key=lambda chunk: self.next_use(chunk, position)):
            room_bytes -= num_bytes(chunk)
            if room_bytes < 0:
                break
            kept.append(chunk)
        return kept

    def plan(
        self, rooms_bytes: Sequence[float], num_bytes: Callable[[Chunk], int]
    ) -> list[tuple[frozenset[Chunk], frozenset[Chunk]]]:
        """Return (chunks held when a position is reached, chunks held after its own were fetched) for each position.

        `rooms_bytes` is the room at each position. Three rounds are simulated, and the last one is the plan.
        """
        held: list[Chunk] = []
        for _ in range(NUM_ROUNDS):
            found = []
            for position, (uses, room_bytes) in enumerate(zip(self._uses, rooms_bytes, strict=True)):
                before = self.choose_kept(held, position - 1, room_bytes, num_bytes)
                held = self.choose_kept(dict.fromkeys([*before, *uses]), position, room_bytes, num_bytes)
                found.append((frozenset(before), frozenset(held)))
        return found
