"""What was communicated: totals always, and every single collective where somebody asks for the events."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CommEvent:
    """One collective on one rank. `message_bytes` is the whole message: the unsharded side of a gather or scatter."""

    op: str
    axis: str
    group_size: int
    message_bytes: int
    dtype: torch.dtype
    phase: str

    @property
    def wire_bytes(self) -> int:
        """What a bandwidth-optimal algorithm sends per rank; an all-reduce is a reduce-scatter and an all-gather.

        A broadcast is counted as the pipelined one, in which every rank but the last passes the message on.
        """
        passes = 2 if self.op == "all_reduce" else 1
        return passes * self.message_bytes * (self.group_size - 1) // self.group_size

    def __str__(self) -> str:
        return f"{self.op} of {self.message_bytes:,} bytes along the {self.axis} axis in {self.phase}"


class CommLog:
    """Bytes by (axis, op, phase); also the list of events with `keeps_events`, which grows without bound."""

    def __init__(self, keeps_events: bool = False):
        self.keeps_events = keeps_events
        self.phase = "setup"
        self.num_recorded, self.last = 0, None  # type: int, CommEvent | None
        self.clear()

    def clear(self) -> None:
        self.events: list[CommEvent] = []
        self.wire_bytes_by: Counter[tuple[str, str, str]] = Counter()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name the part of the step that the collectives of this block belong to."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    def record(self, op: str, axis: str, group_size: int, message: torch.Tensor) -> None:
        event = CommEvent(op, axis, group_size, message.numel() * message.element_size(), message.dtype, self.phase)
        self.num_recorded, self.last = self.num_recorded + 1, event
        self.wire_bytes_by[axis, op, self.phase] += event.wire_bytes
        if self.keeps_events:
            self.events.append(event)

    def wire_bytes(self, axis: str) -> int:
        """Bytes that this rank has sent along `axis` since the log was cleared."""
        return sum(sent for (name, _, _), sent in self.wire_bytes_by.items() if name == axis)
