"""Conclusions from the launches of ranks: whether a job can hang, and for how long the computation waits.

A collective runs when it is next on its communicator on all ranks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from lab.races.simulated_streams import COMPUTATION, Launch


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
