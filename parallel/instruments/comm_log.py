"""A log of collectives: totals of the bytes sent, and on request a list of all collectives."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch


@dataclass
class CommEvent:
    """One collective on one rank.

    `message_bytes` is the size of the unsharded tensor: the output of an all-gather, the input of a reduce-scatter.
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
    """The bytes sent by (axis, op, phase); with `keeps_events` also a list of events, which grows without bound.

    `clock` returns the time of an event, in seconds or in any other number that never decreases. The context manager
    that `on_phase` returns for a phase is active during that phase.
    """

    def __init__(self, keeps_events: bool = False, clock: Callable[[], float] = time.perf_counter):
        self.keeps_events, self.clock = keeps_events, clock
        self.on_phase: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.phase = "setup"
        self.num_recorded = 0
        self.last: CommEvent | None = None
        self.clear()

    def clear(self) -> None:
        self.events: list[CommEvent] = []
        self.wire_bytes_by: Counter[tuple[str, str, str]] = Counter()  # by (axis, op, phase)

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
        """Keep the events of this block in a new list, with times by another clock. Totals count them as usual."""
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
        event.awaited, event.waiting_phase = self.clock(), self.phase

    def record_wait_end(self, event: CommEvent) -> None:
        event.completed = self.clock()

    def wire_bytes(self, axis: str) -> int:
        """Return the bytes that this rank has sent along `axis` since the log was cleared."""
        return sum(sent for (name, _, _), sent in self.wire_bytes_by.items() if name == axis)
