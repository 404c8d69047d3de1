"""A watchdog that ends a job that hangs, and names the rank that hangs and its last collective.

A thread of each rank writes heartbeats to the launcher's store. If a rank has made no progress for `hang_seconds`, its
thread reads the heartbeats of all ranks. If another rank still makes progress, the job continues. Otherwise the rank
that hangs is one whose heartbeats have stopped; if there is none, the one that has launched the fewest collectives,
because the other ranks wait for it in their next collective. The launcher can start the job again.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch.distributed as dist

from parallel.instruments.comm_log import CommLog

EXIT_CODE = 3
POLLS_PER_HANG = 10  # polls in `hang_seconds`


@dataclass(frozen=True)
class Heartbeat:
    """The progress of a rank, as its thread reports it."""

    tick: int  # grows as long as the process runs, even if its main thread hangs
    idle_seconds: float  # since the last progress
    num_collectives: int
    last: str  # the last collective that was launched


class Watchdog:
    """A watchdog of one rank. It ends the job if no rank launches a collective or calls `beat` for `hang_seconds`.

    With `hang_seconds` 0 it does nothing. Before the job ends, every rank whose process still runs calls `on_abort`
    with the reason, in the watchdog's thread.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        log: CommLog,
        hang_seconds: float,
        on_abort: Callable[[str], None] = lambda reason: None,
    ):
        self._store, self._rank, self._size, self._log = store, rank, size, log
        self._on_abort = on_abort
        self._hang_seconds, self._poll_seconds = hang_seconds, hang_seconds / POLLS_PER_HANG
        self._num_beats = self._tick = 0
        self._progress, self._progress_time = (0, 0), time.monotonic()  # (collectives, beats), and when it last changed

    def beat(self) -> None:
        """Record progress other than a collective. May be called from any thread."""
        self._num_beats += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the ranks in this block."""
        ended = threading.Event()
        self._progress_time = time.monotonic()
        thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        if self._hang_seconds:
            # The first heartbeat is written before the block starts: a rank that hangs at once must have one.
            self._write_heartbeat()
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if self._hang_seconds:
                thread.join()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(self._poll_seconds):
            try:
                # This rank's heartbeat is written before the others are read: it must not count as silent meanwhile.
                self._write_heartbeat()
                if self._store.check(["watch/verdict"]):
                    self._on_abort(self._store.get("watch/verdict").decode())
                    os._exit(EXIT_CODE)
                if self._idle_seconds() > self._hang_seconds and self._store.add("watch/num_reporters", 1) == 1:
                    self._report(ended)
            except (RuntimeError, ValueError):  # the rank that serves the store, usually rank 0, has ended
                if self._idle_seconds() > self._hang_seconds:
                    idle = f"{self._idle_seconds():.0f} s"
                    self._end(f"rank {self._rank} has made no progress for {idle}, and rank 0 has ended")

    def _idle_seconds(self) -> float:
        progress = (self._log.num_recorded, self._num_beats)
        if progress != self._progress:
            self._progress, self._progress_time = progress, time.monotonic()
        return time.monotonic() - self._progress_time

    def _write_heartbeat(self) -> None:
        self._tick += 1
        heartbeat = Heartbeat(self._tick, self._idle_seconds(), self._log.num_recorded, str(self._log.last or "none"))
        self._store.set(f"watch/{self._rank}", json.dumps(asdict(heartbeat)))

    def _report(self, ended: threading.Event) -> None:
        """End the job if no rank makes progress. Only the rank that raised "watch/num_reporters" to 1 calls this."""
        # The heartbeats are read twice, three polls apart: in between, every process that still runs writes a new one.
        before = self._heartbeats()
        for _ in range(3):
            if ended.wait(self._poll_seconds):
                return
            self._write_heartbeat()
        if verdict := describe_hang(before, self._heartbeats(), self._hang_seconds, self._size):
            # The verdict is set before this process ends, so that the other ranks end with the same reason.
            self._store.set("watch/verdict", verdict)
            self._end(verdict)
        # A rank still makes progress. The counter is deleted so that any rank may report later; this rank does so after
        # another half of `hang_seconds`.
        self._store.delete_key("watch/num_reporters")
        self._progress_time = time.monotonic() - self._hang_seconds / 2

    def _end(self, reason: str) -> None:
        """End this process from the watchdog's thread: the main thread may never return from its collective."""
        # The line is printed before `on_abort`, which may take long or fail, and both before the process ends.
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
        self._on_abort(reason)
        os._exit(EXIT_CODE)

    def _heartbeats(self) -> dict[int, Heartbeat]:
        keys = {rank: f"watch/{rank}" for rank in range(self._size)}
        return {r: Heartbeat(**json.loads(self._store.get(key))) for r, key in keys.items() if self._store.check([key])}


def describe_hang(
    before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat], hang_seconds: float, size: int
) -> str | None:
    """Return an error message that names the ranks that hang; None if a rank still makes progress.

    `before` and `after` are the heartbeats of all ranks, read a few polls apart.
    """
    silent = [rank for rank in range(size) if rank not in after or before.get(rank) == after[rank]]
    alive = {rank: heartbeat for rank, heartbeat in after.items() if rank not in silent}
    if any(heartbeat.idle_seconds < hang_seconds / 2 for heartbeat in alive.values()):
        return None
    if silent:
        culprits, what = silent, "does not answer"
    else:
        fewest = min(heartbeat.num_collectives for heartbeat in alive.values())
        culprits = [rank for rank, heartbeat in alive.items() if heartbeat.num_collectives == fewest]
        what = f"has made no progress for {hang_seconds:g} s"
    lasts = "; ".join(f"rank {rank} {what}; its last collective: {_last(after, rank)}" for rank in culprits[:4])
    more = f"; and {len(culprits) - 4} more ranks" if len(culprits) > 4 else ""
    return f"{lasts}{more}; the job ends (run.hang_seconds={hang_seconds:g})"


def _last(heartbeats: Mapping[int, Heartbeat], rank: int) -> str:
    return f"{heartbeats[rank].last}, number {heartbeats[rank].num_collectives}" if rank in heartbeats else "unknown"
