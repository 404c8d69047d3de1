"""Accesses to the bytes of one storage, and what an operation does with its arguments.

bytes   | last write, reads since | last write, reads since | ...   stretches that were accessed alike
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lab.observe.fake_tensors import extent
from lab.observe.torch_internals import VIEWS_DESPITE_THEIR_SCHEMA
from lab.races.simulated_streams import Access, Clock, Place, SimulatedStream, calling_places
from parallel.torch_internals import OpOverload, returns_views, schema_of


class AccessedMemory:
    """The accesses to one storage. `owner`: the stream on which it was allocated, from whose pool its memory is."""

    __slots__ = ("_reads", "_starts", "_writes", "is_on_host", "kind", "owner", "reference")

    def __init__(self, owner: SimulatedStream, is_on_host: bool, kind: str):
        self.owner, self.is_on_host, self.kind = owner, is_on_host, kind
        self.reference: Any = None
        self.forget()

    def forget(self) -> None:
        """Forget all accesses: the memory is allocated anew."""
        # Stretch k begins at byte _starts[k] and ends where the next one begins.
        self._starts = [0]
        self._writes: list[Access | None] = [None]
        self._reads: list[dict[SimulatedStream, Access]] = [{}]

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

    def accesses_after(self, clock: Clock) -> Iterator[Access]:
        """Iterate over last writes and reads since that may overtake what a stream with this clock launches."""
        for write, reads in zip(self._writes, self._reads, strict=True):
            if write is not None and not write.is_before(clock):
                yield write
            yield from (read for read in reads.values() if not read.is_before(clock))

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


@dataclass(frozen=True)
class FreedMemory:
    """Memory of a stream's pool, and the accesses of other streams that it may still be used by."""

    kind: str
    accesses: list[Access]
    places: tuple[Place, ...]  # where it was freed


class MemoryPools:
    """The freed memory of CUDA's allocator, which gives it to the stream on which it was allocated, at once."""

    def __init__(self) -> None:
        self._freed: defaultdict[SimulatedStream, list[FreedMemory]] = defaultdict(list)

    def free(self, memory: AccessedMemory) -> None:
        """Return memory to its pool, with the last access of each other stream that may still use it."""
        memory.owner.begin_launch()
        pending = sorted(memory.accesses_after(memory.owner.clock), key=lambda access: access.number)
        if pending:
            latest = {access.stream: access for access in pending}
            self._freed[memory.owner].append(FreedMemory(memory.kind, list(latest.values()), calling_places()))

    def allocate(self, stream: SimulatedStream) -> Iterator[tuple[FreedMemory, Access]]:
        """Iterate over the freed memory that the stream may be given, and the accesses that may still use it."""
        if not self._freed[stream]:
            return
        stream.begin_launch()
        for memory in self._freed.pop(stream):
            yield from ((memory, access) for access in memory.accesses if not access.is_before(stream.clock))


@dataclass(frozen=True)
class Roles:
    """The roles of an operation's arguments, by its schema."""

    name: str
    written: frozenset[int | str]  # positions and names of the arguments that it writes
    reads: bool  # else it takes the shapes of its arguments only
    writes_results: bool
    blocks_host: bool  # the host waits for the values


@cache
def roles_of(function: OpOverload) -> Roles | None:
    """Return the roles of an operation's arguments; None if it accesses no memory."""
    schema = schema_of(function)
    name = schema.name.split("::")[1]
    if returns_views(function) or function in VIEWS_DESPITE_THEIR_SCHEMA or function.namespace in ("c10d", "prim"):
        return None
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {position, argument.name}
    blocks_host = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags))
    takes_shapes = name.startswith("new_") or name.endswith("_like")
    is_empty = name.startswith(("empty", "new_empty"))
    return Roles(name, frozenset(written), not takes_shapes, not is_empty, blocks_host)


def sorted_arguments(roles: Roles, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads only, and those that it writes."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        into = written if key in roles.written else read
        if isinstance(value, Tensor):
            into.append(value)
        elif isinstance(value, (list, tuple)):
            into.extend(item for item in value if isinstance(item, Tensor))
    return read, written


def bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage from the first to after the last element of a tensor that is not empty."""
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + extent(tensor)) * tensor.element_size()
