"""A watchdog that ends a job that hangs, and names the rank that hangs and the collective that it has not completed.

A thread of each rank writes heartbeats to the launcher's store. If a rank has made no progress for `hang_seconds`, or
for less when the time of its steps is known, its thread reads the heartbeats of all ranks. If another rank
still makes progress, the job continues. Otherwise the rank that hangs is one whose heartbeats have stopped; if there is
none, the one that has come least far: all ranks run the same collectives, and the others wait for it in their next one.
What counts is what the device has completed and reached, because the host of a rank may have launched many more. The
launcher can start the job again.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from statistics import median

import torch.distributed as dist

from parallel.comm_log import CommLog, CommProgress
from parallel.ending import EXIT_LOST, end_process
from parallel.validation.fields import parse_json

POLLS_PER_HANG = 10  # polls in the shortest patience
NUM_STEPS, STEPS_PER_HANG = 5, 10  # steps after which their median counts, and how many of it are a hang
LEAST_SHARE, LEAST_SECONDS = 0.3, 180.0  # of `hang_seconds`, the shortest patience; all of it, if it is shorter
POLLS_BETWEEN_READINGS = 3  # of the heartbeats: in between, every process that still runs writes a new one
POLLS_TO_READ_VERDICT = 2
SECONDS_TO_REPORT = 60.0  # for which ranks wait for each other's `on_abort`, after they have read the verdict


@dataclass(frozen=True)
class Heartbeat:
    """The progress of a rank, as its thread reports it."""

    tick: int  # grows as long as the process runs, even if its main thread hangs
    idle_seconds: float  # since the last progress
    num_launched: int  # collectives
    num_reached: int
    num_complete: int
    next: str  # the first collective that is not complete, or the last one if all are

    @property
    def position(self) -> tuple[int, int]:
        """The progress of the rank: no rank completes a collective that another has not reached."""
        return self.num_complete, self.num_reached


@dataclass(frozen=True)
class Verdict:
    """The reason for which all ranks end, and the number of ranks whose processes still run."""

    reason: str
    num_alive: int


class Heart:
    """The progress of one rank, which `write` publishes as a heartbeat: its collectives, phases and calls of `beat`.

    Phases count because stages 0 and 1 have no collective between the micro-batches of a step or of an evaluation. A
    host that begins one may be ahead of its device, but only by as much as CUDA queues.
    """

    def __init__(self, store: dist.Store, rank: int, log: CommLog, clock: Callable[[], float]):
        self.store, self.rank, self.clock, self._log = store, rank, clock, log
        self._found = CommProgress(0, 0, 0, None)
        self._num_beats = self._tick = 0
        self._progress: tuple[int, ...] | None = None  # (complete, reached, phases, beats), and when they last changed
        self.progress_time = clock()

    def beat(self) -> None:
        self._num_beats += 1

    def _progress_of_log(self) -> CommProgress:
        with suppress(RuntimeError):  # a device that has failed, as by an illegal access, makes no more progress
            self._found = self._log.progress()
        return self._found

    def idle_seconds(self) -> float:
        now = self._progress_of_log()
        progress = now.num_complete, now.num_reached, self._log.num_phases, self._num_beats
        if progress != self._progress or self._log.is_busy:
            self._progress, self.progress_time = progress, self.clock()
        return self.clock() - self.progress_time

    def write(self) -> None:
        self._tick += 1
        idle_seconds, now = self.idle_seconds(), self._progress_of_log()
        counts = now.num_launched, now.num_reached, now.num_complete
        heartbeat = Heartbeat(self._tick, idle_seconds, *counts, str(now.next or "none"))
        self.store.set(f"watch/{self.rank}", json.dumps(asdict(heartbeat)))


class Watchdog:
    """A watchdog of one rank. It ends the job if no rank makes progress for `hang_seconds`, or less.

    Progress is a collective that completes, the begin of a phase in `log`, or a call of `beat`. With `hang_seconds` 0
    it does nothing. Before the job ends, every rank whose process still runs calls `on_abort`
    with the reason, in the watchdog's thread. Then they wait for each other, because the launcher kills all ranks as
    soon as one has ended.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        log: CommLog,
        hang_seconds: float,
        on_abort: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._heart = Heart(store, rank, log, clock)
        self._store, self._size, self._on_abort = store, size, on_abort
        self._most_seconds, self._least_seconds = (
            hang_seconds,
            max(LEAST_SHARE * hang_seconds, min(hang_seconds, LEAST_SECONDS)),
        )
        self._poll_seconds = self._least_seconds / POLLS_PER_HANG
        self._waiting_since = math.inf  # for another rank to report
        self.beat = self._heart.beat  # records progress other than a collective; may be called from any thread
        self._step_times: deque[float] = deque(maxlen=64)  # when the newest steps began

    def begin_step(self) -> None:
        self._step_times.append(self._heart.clock())

    @property
    def _hang_seconds(self) -> float:
        """The seconds without progress that are a hang: fewer than the setting if the steps are known."""
        times = list(self._step_times)
        if len(times) <= NUM_STEPS:
            return self._most_seconds
        step_seconds = median(after - before for before, after in pairwise(times))
        return min(self._most_seconds, max(self._least_seconds, STEPS_PER_HANG * step_seconds))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the ranks in this block."""
        if not self._most_seconds:
            yield
            return
        ended = threading.Event()
        self._heart.progress_time = self._heart.clock()
        # The first heartbeat is written before the block starts: a rank that hangs at once must have one.
        self._heart.write()
        thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        heart = self._heart
        while not ended.wait(self._poll_seconds):
            try:
                # This rank's heartbeat is written before the others are read: it must not count as silent meanwhile.
                heart.write()
                if self._store.check(["watch/verdict"]):
                    self._end(parse_json(Verdict, self._store.get("watch/verdict")))
                if self._may_report():
                    self._report(ended)
            except (RuntimeError, ValueError):  # the rank that serves the store, usually rank 0, has ended
                if (idle_seconds := heart.idle_seconds()) > self._hang_seconds:
                    reason = f"has made no progress for {idle_seconds:.0f} s, and rank 0 has ended"
                    self._end(Verdict(f"rank {heart.rank} {reason}", num_alive=1), prints=True)

    def _may_report(self) -> bool:
        """Return whether this rank is to report: the first that asks, or any if that one has stopped meanwhile."""
        if self._heart.idle_seconds() <= self._hang_seconds:
            self._waiting_since = math.inf
            return False
        if self._store.add("watch/num_reporters", 1) == 1:
            return True
        now = self._heart.clock()
        self._waiting_since = min(self._waiting_since, now)
        return now - self._waiting_since > self._hang_seconds

    def _report(self, ended: threading.Event) -> None:
        """End the job if no rank makes progress."""
        before = self._heartbeats()
        for _ in range(POLLS_BETWEEN_READINGS):
            if ended.wait(self._poll_seconds):
                return
            self._heart.write()
        if verdict := describe_hang(before, self._heartbeats(), self._hang_seconds, self._size):
            # The verdict is set before this process ends, so that the other ranks end with the same reason.
            self._store.set("watch/verdict", json.dumps(asdict(verdict)))
            self._end(verdict, prints=True)
        # A rank still makes progress. The counter is deleted so that any rank may report later; this rank does so after
        # another half of `hang_seconds`.
        self._store.delete_key("watch/num_reporters")
        self._heart.progress_time = self._heart.clock() - self._hang_seconds / 2

    def _end(self, verdict: Verdict, *, prints: bool = False) -> None:
        """End this process from the watchdog's thread."""

        def report() -> None:
            try:
                self._on_abort(verdict.reason)
            finally:
                # It is waited for on all ranks that still run; one that hangs there too is left behind.
                if self._store.add("watch/num_reported", 1) == verdict.num_alive:
                    self._store.set("watch/all_reported", "")
                seconds = POLLS_TO_READ_VERDICT * self._poll_seconds + SECONDS_TO_REPORT
                self._store.wait(["watch/all_reported"], timedelta(seconds=seconds))

        end_process(EXIT_LOST, verdict.reason if prints else "", report)

    def _heartbeats(self) -> dict[int, Heartbeat]:
        keys = {rank: f"watch/{rank}" for rank in range(self._size)}
        return {r: parse_json(Heartbeat, self._store.get(key)) for r, key in keys.items() if self._store.check([key])}


def describe_hang(
    before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat], hang_seconds: float, size: int
) -> Verdict | None:
    """Return the verdict that names the ranks that hang; None if a rank still makes progress.

    `before` and `after` are the heartbeats of all ranks, read a few polls apart.
    """
    silent = [rank for rank in range(size) if rank not in after or before.get(rank) == after[rank]]
    alive = {rank: heartbeat for rank, heartbeat in after.items() if rank not in silent}
    if any(heartbeat.idle_seconds < hang_seconds / 2 for heartbeat in alive.values()):
        return None
    if silent:
        culprits, what = silent, "does not answer"
    else:
        least = min(heartbeat.position for heartbeat in alive.values())
        culprits = [rank for rank, heartbeat in alive.items() if heartbeat.position == least]
        what = f"has made no progress for {hang_seconds:g} s"
    found = "; ".join(f"rank {rank} {what}: {_describe(after.get(rank))}" for rank in culprits[:4])
    more = f"; and {len(culprits) - 4} more ranks" if len(culprits) > 4 else ""
    return Verdict(f"{found}{more}; the job ends (run.hang_seconds)", len(alive))


def _describe(heartbeat: Heartbeat | None) -> str:
    """Return what a rank was doing."""
    if heartbeat is None:
        return "its collectives are unknown"
    is_last = heartbeat.num_complete == heartbeat.num_launched
    return (
        f"{heartbeat.num_complete} of its {heartbeat.num_launched} collectives are complete, "
        f"the {'last' if is_last else 'next'} one is {heartbeat.next}"
    )
