"""A log of collectives: always their totals, and every single one if it keeps events."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch


@dataclass
class CommEvent:
    """One collective on one rank. `message_bytes` is the whole message: the unsharded side of a gather or scatter.

    The times are the log's clock when the collective was launched, and when the wait for it began and ended.
    """

    op: str
    axis: str
    group_size: int
    message_bytes: int
    dtype: torch.dtype
    phase: str
    launched: float = field(default=0, compare=False)
    awaited: float = field(default=0, compare=False)
    completed: float = field(default=0, compare=False)

    @property
    def wire_bytes(self) -> int:
        """The bytes that a rank sends in a bandwidth-optimal algorithm.

        An all-reduce is a reduce-scatter and an all-gather. A broadcast is a pipeline, in which every rank but the last
        passes the message on.
        """
        passes = 2 if self.op == "all_reduce" else 1
        return passes * self.message_bytes * (self.group_size - 1) // self.group_size

    def __str__(self) -> str:
        return f"{self.op} of {self.message_bytes:,} bytes along the {self.axis} axis in {self.phase}"


class CommLog:
    """Bytes sent, by (axis, op, phase); with `keeps_events` also the list of events, which grows without bound.

    `clock` returns the times of events: seconds, or any number that grows. `on_phase` returns a context manager that is
    entered with every phase.
    """

    def __init__(self, keeps_events: bool = False, clock: Callable[[], float] = time.perf_counter):
        self.keeps_events, self.clock = keeps_events, clock
        self.on_phase: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.phase = "setup"
        self.num_recorded, self.last = 0, None  # type: int, CommEvent | None
        self.clear()

    def clear(self) -> None:
        self.events: list[CommEvent] = []
        self.wire_bytes_by: Counter[tuple[str, str, str]] = Counter()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Assign the collectives of this block to a phase, a part of the step."""
        outer, self.phase = self.phase, phase
        try:
            with self.on_phase(phase):
                yield
        finally:
            self.phase = outer

    @contextmanager
    def keeping_events(self, clock: Callable[[], float]) -> Iterator[list[CommEvent]]:
        """Keep the events of this block in a list of their own, with times by another clock. Totals go on."""
        outer = self.keeps_events, self.events, self.clock
        self.keeps_events, self.events, self.clock = True, [], clock
        try:
            yield self.events
        finally:
            self.keeps_events, self.events, self.clock = outer

    def record(self, op: str, axis: str, group_size: int, message: torch.Tensor) -> CommEvent:
        num_bytes = message.numel() * message.element_size()
        event = CommEvent(op, axis, group_size, num_bytes, message.dtype, self.phase, self.clock())
        self.num_recorded, self.last = self.num_recorded + 1, event
        self.wire_bytes_by[axis, op, self.phase] += event.wire_bytes
        if self.keeps_events:
            self.events.append(event)
        return event

    def record_wait_start(self, event: CommEvent) -> None:
        event.awaited = self.clock()

    def record_wait_end(self, event: CommEvent) -> None:
        event.completed = self.clock()

    def wire_bytes(self, axis: str) -> int:
        """Return the bytes that this rank has sent along `axis` since the log was cleared."""
        return sum(sent for (name, _, _), sent in self.wire_bytes_by.items() if name == axis)
