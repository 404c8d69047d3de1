"""The order in which a rank launches operations on its streams, as data, and what it says about waiting.

    launches of one rank    computation | communicator | side stream | computation ...      in the order of the host
    waits_for               {stream: number of its launch} that must have run before

From the launches of all ranks follows whether a job can hang: a collective runs when it is next on its communicator
on all ranks. From those of one rank follows which collectives overlap with the computation.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

COMPUTATION, HOST, COMMUNICATOR, SIDE_STREAM = "the computation", "the host", "the communicator", "side stream"


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation, or a collective, on a stream: its `number`-th.

    `waits_for` are (stream, number) that must have run before it, beside what was launched before it on its own stream.
    `num_bytes` are those of a collective's message, or those that an operation reads and writes. `ranks` are the
    members of a collective's communicator, () of an operation.
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


@dataclass(frozen=True)
class Overlap:
    """A collective for which the computation waits, and what it runs between launch and wait."""

    collective: Launch
    num_operations: int
    operation_bytes: int  # that these operations read and write


def overlaps(launches: Sequence[Launch], first: int = 0) -> list[Overlap]:
    """Return the overlap of each collective for which the computation waits in `launches[first:]`.

    It may have been launched before: the next step waits for what the last one gathers.
    """
    found: list[Overlap] = []
    known: defaultdict[tuple[str, int], dict[str, int]] = defaultdict(dict)  # what has run before a launch has
    latest: defaultdict[str, dict[str, int]] = defaultdict(dict)  # the same of the last launch of each stream
    in_flight: dict[tuple[str, int], tuple[Launch, int, int]] = {}  # with what has been computed before the launch
    num_operations = num_bytes = 0
    for position, launch in enumerate(launches):
        before = dict(latest[launch.stream])
        for stream, number in launch.waits_for:
            for other, reached in (*known[stream, number].items(), (stream, number)):
                before[other] = max(before.get(other, 0), reached)
        known[launch.stream, launch.number] = latest[launch.stream] = before
        if launch.is_collective:
            in_flight[launch.stream, launch.number] = launch, num_operations, num_bytes
        elif launch.stream == COMPUTATION:
            for key in [key for key in in_flight if before.get(key[0], 0) >= key[1]]:
                collective, num_before, bytes_before = in_flight.pop(key)
                if position >= first:
                    found.append(Overlap(collective, num_operations - num_before, num_bytes - bytes_before))
            num_operations, num_bytes = num_operations + 1, num_bytes + launch.num_bytes
    return found


def exposed(launches: Sequence[Launch], first: int = 0) -> list[Launch]:
    """Return the collectives for which the computation waits at once, without an operation in between."""
    return [overlap.collective for overlap in overlaps(launches, first) if not overlap.num_operations]


def waiting_time(launches: Sequence[Launch], duration: Callable[[Launch], float], first: int = 0) -> float:
    """Return for how long the computation waits for other streams in `launches[first:]`.

    `duration` is that of a launch, in any unit. A launch begins when all that it waits for has ended.
    """
    ends: dict[tuple[str, int], float] = {}
    free: defaultdict[str, float] = defaultdict(float)  # {stream: time at which its launches so far have ended}
    total = 0.0
    for position, launch in enumerate(launches):
        start = max([free[launch.stream], *(ends[key] for key in launch.waits_for)])
        if launch.stream == COMPUTATION and position >= first:
            total += start - free[COMPUTATION]
        free[launch.stream] = ends[launch.stream, launch.number] = start + duration(launch)
    return total


class Job:
    """All ranks of a job, each of which runs its launches: every stream in order, and collectives together."""

    def __init__(self, launches: Sequence[Sequence[Launch]]):
        """Queue what each rank launches; `launches` are those of every rank."""
        self._queues: list[dict[str, deque[Launch]]] = [{} for _ in launches]
        for queues, of_rank in zip(self._queues, launches, strict=True):
            for launch in of_rank:
                queues.setdefault(launch.stream, deque()).append(launch)
        self._done: list[defaultdict[str, int]] = [defaultdict(int) for _ in launches]

    def run(self) -> list[str]:
        """Run as much as can run; return a line for each stream that is stuck, with what is next on it."""
        while any(self._run_stream(rank, stream) for rank, queues in enumerate(self._queues) for stream in queues):
            pass
        return [
            f"rank {rank}: {queue[0]}" for rank, queues in enumerate(self._queues) for queue in queues.values() if queue
        ]

    def _run_stream(self, rank: int, stream: str) -> bool:
        """Run what can run on a stream of a rank; return whether there was anything."""
        queue, has_run = self._queues[rank][stream], False
        while queue and all(self._is_ready(member, queue[0]) for member in queue[0].ranks or (rank,)):
            for member in queue[0].ranks or (rank,):
                if member != rank:
                    self._finish(member, stream)
            self._finish(rank, stream)
            has_run = True
        return has_run

    def _is_ready(self, rank: int, expected: Launch) -> bool:
        """Return whether a rank can run its next launch on a stream, which is the expected one if it is collective."""
        queue, done = self._queues[rank].get(expected.stream), self._done[rank]
        if not queue or (expected.is_collective and queue[0].message != expected.message):
            return False
        return all(done[stream] >= number for stream, number in queue[0].waits_for)

    def _finish(self, rank: int, stream: str) -> None:
        self._done[rank][stream] = self._queues[rank][stream].popleft().number
