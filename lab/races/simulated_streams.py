"""Simulated streams, and the order in which they run what is launched on them.

A clock is {stream: number of that stream's last operation that has surely run before}: a vector clock. The host counts
as a stream. What a stream launches runs after all that the host has waited for by then, and has done itself.
"""

import inspect
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

COMPUTATION, HOST, COMMUNICATOR, SIDE_STREAM = "the computation", "the host", "the communicator", "side stream"
Clock = Counter["SimulatedStream"]
Place = tuple[CodeType, int]  # a line of code
Message = tuple[()] | tuple[tuple[int, ...], int, torch.dtype | None]  # (ranks, bytes, dtype)

ROOT = Path(__file__).parents[2]
# Calls that pass through these files are issued by their callers.
DOORS = (
    "lab/observe",
    "lab/races",
    "parallel/comm_log.py",
    "parallel/memory_kinds.py",
    "parallel/mesh.py",
    "parallel/pairwise.py",
    "parallel/store.py",
    "parallel/streams.py",
    "parallel/torch_internals.py",
    "zero/core/memory/streams.py",
)
FOREIGN = (
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
    *(str(ROOT / door) for door in DOORS),
    "<",  # code that was made from a string
)
NUM_PLACES = 2  # the line that issued an operation, and the one that called its function


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation, or a collective, on a stream: its `number`-th.

    `waits_for` has, for each other stream, the number of its last launch that must have run before. `num_bytes` are
    those of a collective's message, or those that an operation reads and writes. `ranks` are the members of a
    collective's communicator, () of an operation.
    """

    stream: str
    number: int
    name: str
    waits_for: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] = ()
    num_bytes: int = 0
    dtype: torch.dtype | None = None

    @property
    def is_collective(self) -> bool:
        return bool(self.ranks)

    @property
    def message(self) -> tuple[str, str, int, torch.dtype | None, tuple[int, ...]]:
        """The collective as all of its members must launch it."""
        return self.stream, self.name, self.num_bytes, self.dtype, self.ranks

    def __str__(self) -> str:
        message = f" of {self.num_bytes:,} bytes of {self.dtype}" if self.is_collective else ""
        return f"{self.name}{message} on {self.stream}"


class SimulatedStream:
    """A stream of a GPU, or the host; `parallel.streams.Stream` has its methods."""

    def __init__(self, streams: "SimulatedStreams", name: str):
        self._streams, self.name = streams, name
        self.clock: Clock = Counter()

    def launch(self, name: str, message: Message = ()) -> "Access":
        """Return the next operation of this stream; `message` is recorded with it."""
        self.begin_launch()
        if self._streams.launches is not None:
            waits_for = tuple((stream.name, number) for stream, number in self.clock.items() if stream is not self)
            self._streams.launches.append(Launch(self.name, self.clock[self] + 1, name, waits_for, *message))
        self.clock[self] += 1
        return Access(self, self.clock[self], name)

    def begin_launch(self) -> None:
        """Order what is launched next after all that the host has waited for, and has done itself."""
        host = self._streams.host  # what it waits for ends with a launch of its own
        if self.clock[host] != host.clock[host]:
            self.clock |= host.clock  # the later of the two, of each stream

    def record_event(self) -> "SimulatedEvent":
        self.begin_launch()
        return SimulatedEvent(self._streams, self.clock.copy())

    def wait_event(self, event: "SimulatedEvent") -> None:
        self.clock |= event.clock

    def wait_stream(self, stream: "SimulatedStream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Launch on this stream in this block."""
        outer, self._streams.current = self._streams.current, self
        try:
            yield
        finally:
            self._streams.current = outer

    def __str__(self) -> str:
        return self.name


class SimulatedEvent:
    """A point in the order of a simulated stream."""

    def __init__(self, streams: "SimulatedStreams", clock: Clock):
        self._streams, self.clock = streams, clock

    def synchronize(self) -> None:
        self._streams.host.wait_event(self)
        self._streams.host.launch("synchronize")

    def query(self) -> bool:
        """Return True, and let the host know it: on a CPU the event has passed."""
        self.synchronize()
        return True


class SimulatedStreams:
    """All streams of a run. `current` is that on which operations are launched, at first the computation's."""

    def __init__(self, records_launches: bool) -> None:
        self.launches: list[Launch] | None = [] if records_launches else None  # in the order of the host
        self._num_side_streams = 0
        self.host = SimulatedStream(self, HOST)
        self.current = SimulatedStream(self, COMPUTATION)

    def new_side_stream(self) -> SimulatedStream:
        self._num_side_streams += 1
        return SimulatedStream(self, f"{SIDE_STREAM} {self._num_side_streams}")

    def new_communicator(self, axis: str) -> SimulatedStream:
        return SimulatedStream(self, f"{COMMUNICATOR} {axis}")


class Access:
    """An operation of a stream, or of the host, that accesses memory: its `number`-th."""

    __slots__ = ("is_reported", "name", "number", "places", "stream")

    def __init__(self, stream: SimulatedStream, number: int, name: str):
        self.stream, self.number, self.name = stream, number, name
        self.places, self.is_reported = calling_places(), False

    def is_before(self, clock: Clock) -> bool:
        """Return whether the operation has run before anything that a stream with this clock launches."""
        return clock[self.stream] >= self.number

    def __str__(self) -> str:
        return f"{self.name} by {self.stream} ({describe(self.places)})"


def remedy(earlier: Access, later: SimulatedStream) -> str:
    """Return which wait is missing between two operations."""
    first = str(earlier.stream)
    if str(later) == HOST:
        return f"the host must wait for {first} (`synchronize`, a `host_work`)"
    if first.startswith(COMMUNICATOR):
        return f"{later} must `wait` for the `Work` of that {earlier.name}"
    if first.startswith(SIDE_STREAM):
        return f"{later} must wait for {first} (a `device_work`)"
    return f"{later} must wait for {first} (as in a `SideStream.context`)"


def calling_places() -> tuple[Place, ...]:
    """Return the lines outside of torch, the instruments and the doors that are running, the innermost one first."""
    places: list[Place] = []
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and len(places) < NUM_PLACES:
        if not _is_foreign(frame.f_code):
            places.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(places)


@cache
def _is_foreign(code: CodeType) -> bool:
    return code.co_filename.startswith(FOREIGN) or "site-packages" in code.co_filename


def describe(places: tuple[Place, ...]) -> str:
    """Return lines as text: the innermost one, and the one that called its function."""
    return ", from ".join(f"{_short(code.co_filename)}:{line} in {code.co_name}" for code, line in places) or "torch"


def _short(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else name
