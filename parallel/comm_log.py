"""A log of collectives: totals of the bytes sent, the newest collectives, and on request a list of all.

A collective is launched by the host, reached by the device when all that was queued before it is done, and complete
when its result may be read by what is queued after the wait for it. On a CPU the host is the device.
"""

import inspect
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

# The newest collectives that are kept; more cannot be queued: CUDA blocks the host after about as many kernels.
NUM_NEWEST = 1024


def mark_on_gpu() -> torch.cuda.Event:
    """Return a mark behind all that has been queued on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass
class CommEvent:
    """One collective on one rank.

    `message_bytes` is the size of the unsharded tensor: the output of an all-gather, the input of a reduce-scatter, and
    what all ranks of an all-to-all send. `sent_bytes` are those of this rank in an all-to-all, to other ranks.
    `launched`, `awaited` and `completed` are the times by the log's clock when the collective was launched, and when
    the wait for it began and ended; None if it has not been waited for. `waiting_phase` is the phase of that wait.
    """

    op: str
    axis: str
    group_size: int
    message_bytes: int
    dtype: torch.dtype
    phase: str
    launched: float = field(default=0, compare=False)
    awaited: float | None = field(default=None, compare=False)
    completed: float | None = field(default=None, compare=False)
    waiting_phase: str = field(default="", compare=False)
    sent_bytes: int | None = None
    place: tuple[str, int] = field(default=("", 0), compare=False)  # the file and the line that launched it
    # The device has passed a mark if `query` returns True, which never waits; None: the host's word is enough.
    reach_mark: torch.cuda.Event | None = field(default=None, compare=False, repr=False)
    end_mark: torch.cuda.Event | None = field(default=None, compare=False, repr=False)

    @property
    def is_reached(self) -> bool:
        return self.reach_mark is None or self.reach_mark.query()

    @property
    def is_complete(self) -> bool:
        return self.completed is not None and (self.end_mark is None or self.end_mark.query())

    @property
    def wire_bytes(self) -> int:
        """The bytes that a rank sends in a bandwidth-optimal algorithm.

        An all-reduce is a reduce-scatter and an all-gather. A broadcast is a pipeline, in which every rank but the last
        passes the message on.
        """
        if self.sent_bytes is not None:
            return self.sent_bytes
        passes = 2 if self.op == "all_reduce" else 1
        return passes * self.message_bytes * (self.group_size - 1) // self.group_size

    def __str__(self) -> str:
        file, line = self.place
        place = f" at {'/'.join(file.split('/')[-2:])}:{line}" if file else ""
        return f"{self.op} of {self.message_bytes:,} bytes along the {self.axis} axis in {self.phase}{place}"


@dataclass(frozen=True)
class CommProgress:
    """The numbers of collectives that were launched, reached and completed, and the one that is next.

    `next` is the first one that is not complete, or the last one if all are.
    """

    num_launched: int
    num_reached: int
    num_complete: int
    next: CommEvent | None


class CommLog:
    """The bytes sent by (axis, op, phase); with `keeps_events` also a list of events, which grows without bound.

    `clock` returns the time of an event, in seconds or in any other number that never decreases. The context manager
    that `on_phase` returns for a phase is active during that phase.
    """

    def __init__(self, keeps_events: bool = False, clock: Callable[[], float] = time.perf_counter):
        self.keeps_events, self.clock = keeps_events, clock
        self.on_phase: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.phase, self.num_phases, self.is_busy = "setup", 0, False
        self.num_recorded = 0
        self.newest: deque[CommEvent] = deque(maxlen=NUM_NEWEST)
        self._is_on_gpu = False
        self.clear()

    @property
    def last(self) -> CommEvent | None:
        """The newest collective."""
        return self.newest[-1] if self.newest else None

    def follow(self, device: torch.device) -> None:
        """Let the device say, and not the host, which of the collectives that follow are reached and complete."""
        self._is_on_gpu = device.type == "cuda"

    def clear(self) -> None:
        self.events: list[CommEvent] = []
        self.wire_bytes_by: Counter[tuple[str, str, str]] = Counter()  # by (axis, op, phase)

    def note_progress(self) -> None:
        """Count progress that is no collective, such as a part of a file that was read, as a phase."""
        self.num_phases += 1

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count this rank as one that makes progress in this block: it works on its own, and waits for no other."""
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Assign the collectives of this block to a phase, a part of the step."""
        outer, self.phase = self.phase, phase
        self.num_phases += 1
        try:
            with self.on_phase(phase):
                yield
        finally:
            self.phase = outer

    @contextmanager
    def keeping_events(self, clock: Callable[[], float]) -> Iterator[list[CommEvent]]:
        """Keep the events of this block in a new list, with times by another clock. Totals count them as usual."""
        outer = self.keeps_events, self.events, self.clock
        self.keeps_events, self.events, self.clock = True, [], clock
        try:
            yield self.events
        finally:
            self.keeps_events, self.events, self.clock = outer

    def record(
        self,
        op: str,
        axis: str,
        group_size: int,
        message: torch.Tensor,
        uneven_numels: tuple[int, int] | None = None,
    ) -> CommEvent:
        """Record a launch; `uneven_numels` are the elements that all ranks send, and that this one sends to others."""
        numel, sent_numel = (message.numel(), None) if uneven_numels is None else uneven_numels
        event = CommEvent(op, axis, group_size, numel * message.itemsize, message.dtype, self.phase, self.clock())
        event.sent_bytes = None if sent_numel is None else sent_numel * message.itemsize
        event.place, event.reach_mark = _place(), self._mark()
        self.num_recorded += 1
        self.newest.append(event)
        self.wire_bytes_by[axis, op, self.phase] += event.wire_bytes
        if self.keeps_events:
            self.events.append(event)
        return event

    def _mark(self) -> torch.cuda.Event | None:
        return mark_on_gpu() if self._is_on_gpu else None

    def record_wait_start(self, event: CommEvent) -> None:
        event.awaited, event.waiting_phase = self.clock(), self.phase

    def record_wait_end(self, event: CommEvent) -> None:
        # In this order: another thread takes an event with `completed` and without a mark for complete.
        event.end_mark, event.completed = self._mark(), self.clock()

    def progress(self) -> CommProgress:
        """Return how far this rank has come. May be called from any thread; waits for nothing."""
        newest = list(self.newest)
        incomplete = [event for event in newest if not event.is_complete]
        num_reached = self.num_recorded - sum(not event.is_reached for event in newest)
        following = incomplete[0] if incomplete else self.last
        return CommProgress(self.num_recorded, num_reached, self.num_recorded - len(incomplete), following)

    def wire_bytes(self, axis: str) -> int:
        """Return the bytes that this rank has sent along `axis` since the log was cleared."""
        return sum(sent for (name, _, _), sent in self.wire_bytes_by.items() if name == axis)


def _place() -> tuple[str, int]:
    """Return the file and the line that called the function of an axis that has called `CommLog.record`."""
    frame = inspect.currentframe()
    assert frame is not None
    frame = frame.f_back.f_back  # type: ignore[union-attr]  # of the caller of `record`
    file = frame.f_code.co_filename if frame else ""
    while frame is not None and frame.f_code.co_filename == file:
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
