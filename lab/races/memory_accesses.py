"""Accesses to the bytes of one storage, and what an operation does with its arguments."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lab.observe.fake_tensors import extent
from lab.observe.torch_internals import VIEWS_DESPITE_THEIR_SCHEMA
from lab.races.simulated_streams import Access, Clock, Place, SimulatedStream, calling_places
from parallel.torch_internals import OpOverload, returns_views, schema_of


@dataclass(slots=True)
class Stretch:
    """Bytes from `start` on that were accessed alike: the last write, and the last read since of each stream."""

    start: int
    write: Access | None = None
    reads: dict[SimulatedStream, Access] = field(default_factory=dict)

    def pending(self, clock: Clock) -> Iterator[Access]:
        """Iterate over the accesses that may overtake what a stream with this clock launches, the write first."""
        if self.write is not None and not self.write.is_before(clock):
            yield self.write
        yield from (read for read in self.reads.values() if not read.is_before(clock))


class AccessedMemory:
    """The accesses to one storage. `owner`: the stream on which it was allocated, from whose pool its memory is."""

    __slots__ = ("_stretches", "is_on_host", "kind", "owner", "reference")

    def __init__(self, owner: SimulatedStream, is_on_host: bool, kind: str):
        self.owner, self.is_on_host, self.kind = owner, is_on_host, kind
        self.reference: Any = None
        self.forget()

    def forget(self) -> None:
        """Forget all accesses: the memory is allocated anew."""
        self._stretches = [Stretch(0)]  # each ends where the next one begins

    def read(self, start: int, stop: int, access: Access) -> Access | None:
        """Record a read of bytes; return a write that it may overtake."""
        found = self._pending_write(start, stop, access.stream.clock)
        for stretch in self._stretches[self._between(start, stop)]:
            stretch.reads[access.stream] = access
        return found

    def write(self, start: int, stop: int, access: Access) -> Access | None:
        """Record a write of bytes; return an access that it may overtake."""
        between = self._between(start, stop)
        pending = [one for stretch in self._stretches[between] for one in stretch.pending(access.stream.clock)]
        self._stretches[between] = [Stretch(start, access)]
        return pending[-1] if pending else None

    def is_written_before(self, start: int, stop: int, clock: Clock) -> bool:
        """Return whether the bytes have been written before anything that a stream with this clock launches."""
        return self._pending_write(start, stop, clock) is None

    def accesses_after(self, clock: Clock) -> Iterator[Access]:
        """Iterate over last writes and reads since that may overtake what a stream with this clock launches."""
        return (access for stretch in self._stretches for access in stretch.pending(clock))

    def _pending_write(self, start: int, stop: int, clock: Clock) -> Access | None:
        found = None
        for stretch in self._stretches[self._between(start, stop)]:
            if stretch.write is not None and not stretch.write.is_before(clock):
                found = stretch.write
        return found

    def _between(self, start: int, stop: int) -> slice:
        """Return the positions of the stretches that bytes start to stop consist of, cut at both ends if need be."""
        return slice(self._cut(start), self._cut(stop))

    def _cut(self, byte: int) -> int:
        """Return the position of the stretch that begins at a byte."""
        k = bisect_right(self._stretches, byte, key=attrgetter("start")) - 1
        found = self._stretches[k]
        if found.start == byte:
            return k
        self._stretches.insert(k + 1, Stretch(byte, found.write, dict(found.reads)))
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
