"""Accesses to the bytes of one storage, and the order in which streams have made them.

    Access      stream S, its n-th operation        ordered before what stream T launches now if T's clock has n for S
    bytes       | last write, reads since | last write, reads since | ...   stretches that were accessed alike

A clock is {stream: number of that stream's last operation that has surely run before}: a vector clock. The host counts
as a stream.
"""

import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch

Clock = dict[Any, int]
Place = tuple[CodeType, int]  # a line of code

ROOT = Path(__file__).parents[2]
# Calls that pass through these files are issued by their callers.
DOORS = (
    "parallel/instruments",
    "parallel/mesh.py",
    "parallel/streams.py",
    "parallel/torch_internals.py",
    "zero/offload/streams.py",
)
FOREIGN = (
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
    *(str(ROOT / door) for door in DOORS),
    "<",  # code that was made from a string
)
NUM_PLACES = 2  # the line that issued an operation, and the one that called its function


class Access:
    """One operation of a stream, or of the host, on memory."""

    __slots__ = ("name", "number", "places", "stream")

    def __init__(self, stream: Any, number: int, name: str):
        self.stream, self.number, self.name = stream, number, name
        self.places = calling_places()

    def is_before(self, clock: Clock) -> bool:
        """Return whether the operation has run before anything that a stream with this clock launches."""
        return clock.get(self.stream, 0) >= self.number

    def __str__(self) -> str:
        return f"{self.name} by {self.stream} ({describe(self.places)})"


class AccessedMemory:
    """The accesses to one storage. `owner`: the stream on which it was allocated, from whose pool its memory is."""

    __slots__ = ("_reads", "_starts", "_writes", "is_on_host", "kind", "num_bytes", "owner", "reference")

    def __init__(self, owner: Any, is_on_host: bool, num_bytes: int, kind: str):
        self.owner, self.is_on_host, self.num_bytes, self.kind = owner, is_on_host, num_bytes, kind
        self.reference: Any = None
        self.forget()

    def forget(self) -> None:
        """Forget all accesses: the memory is allocated anew."""
        # Stretch k begins at byte _starts[k] and ends where the next one begins.
        self._starts = [0]
        self._writes: list[Access | None] = [None]
        self._reads: list[dict[Any, Access]] = [{}]

    def read(self, start: int, stop: int, access: Access, clock: Clock) -> Access | None:
        """Record a read of bytes; return a write that it may overtake."""
        stream, found = access.stream, None
        for k in self._stretches(start, stop):
            write = self._writes[k]
            if write is not None and write.stream is not stream and not write.is_before(clock):
                found = write
            self._reads[k][stream] = access
        return found

    def write(self, start: int, stop: int, access: Access, clock: Clock) -> Access | None:
        """Record a write of bytes; return an access that it may overtake."""
        stream, found = access.stream, None
        stretches = self._stretches(start, stop)
        for k in stretches:
            write = self._writes[k]
            if write is not None and write.stream is not stream and not write.is_before(clock):
                found = write
            for read in self._reads[k].values():
                if read.stream is not stream and not read.is_before(clock):
                    found = read
        first, end = stretches.start, stretches.stop
        self._starts[first:end] = [start]
        self._writes[first:end] = [access]
        self._reads[first:end] = [{}]
        return found

    def is_written_before(self, start: int, stop: int, clock: Clock) -> bool:
        """Return whether the bytes have been written before anything that a stream with this clock launches."""
        writes = (self._writes[k] for k in self._stretches(start, stop))
        return all(write is None or write.is_before(clock) for write in writes)

    def accesses(self) -> Iterator[Access]:
        """Iterate over the last write and the reads since of every stretch."""
        for write, reads in zip(self._writes, self._reads, strict=True):
            if write is not None:
                yield write
            yield from reads.values()

    def _stretches(self, start: int, stop: int) -> range:
        """Return the numbers of the stretches that bytes start to stop consist of, cut at both ends if need be."""
        first = self._cut(start)
        last = first + 1
        if last == len(self._starts) or self._starts[last] != stop:
            last = self._cut(stop)
        return range(first, last)

    def _cut(self, byte: int) -> int:
        """Return the number of the stretch that begins at a byte."""
        k = bisect_right(self._starts, byte) - 1
        if self._starts[k] == byte:
            return k
        self._starts.insert(k + 1, byte)
        self._writes.insert(k + 1, self._writes[k])
        self._reads.insert(k + 1, dict(self._reads[k]))
        return k + 1


def calling_places() -> list[Place]:
    """Return the lines outside of torch, the instruments and the doors that are running, the innermost one first."""
    places: list[Place] = []
    frame = sys._getframe(2)
    while frame is not None:
        if not _is_foreign(frame.f_code):
            places.append((frame.f_code, frame.f_lineno))
            if len(places) == NUM_PLACES:
                break
        frame = frame.f_back  # type: ignore[assignment]
    return places


@cache
def _is_foreign(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(FOREIGN) or "site-packages" in name


def describe(places: list[Place]) -> str:
    """Return the lines as text: "file:line in function", called by the next one."""
    return ", from ".join(f"{_short(code.co_filename)}:{line} in {code.co_name}" for code, line in places) or "torch"


def _short(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else name
