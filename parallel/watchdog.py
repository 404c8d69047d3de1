"""A watchdog that names a rank that hangs, with its last collective, and ends the job: a launcher can start it again.

A thread of each rank writes a heartbeat to the launcher's store. A rank without progress for long reads the heartbeats
of all. If any rank makes progress, it goes on waiting; otherwise the culprit is a rank without new heartbeats, or the
one with the fewest collectives, for which the others wait in their next one.
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
POLLS = 10  # per `hang_seconds`


@dataclass(frozen=True)
class Heartbeat:
    """The progress of a rank. `tick` grows as long as its process runs."""

    tick: int
    idle_seconds: float
    num_collectives: int
    last: str


class Watchdog:
    """A watchdog of one rank. The job ends after `hang_seconds` without a collective or a `beat` on any rank; 0: never.

    `on_abort` is called with the reason, in a thread, on every rank whose process still runs, before it ends.
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
        self._hang_seconds, self._poll_seconds = hang_seconds, hang_seconds / POLLS
        self._num_beats = self._tick = 0
        self._seen, self._seen_at = (0, 0), time.monotonic()

    def beat(self) -> None:
        """Count as progress that is not a collective. May be called from any thread."""
        self._num_beats += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the ranks in this block."""
        ended = threading.Event()
        self._seen_at = time.monotonic()
        thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        if self._hang_seconds:
            # The first heartbeat is written before the block starts: a rank that hangs at once is known by it.
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
                # The own heartbeat first: this rank is alive while it looks for others that are not.
                self._write_heartbeat()
                if self._store.check(["watch/verdict"]):
                    self._on_abort(self._store.get("watch/verdict").decode())
                    os._exit(EXIT_CODE)
                if self._idle_seconds() > self._hang_seconds and self._store.add("watch/num_reporters", 1) == 1:
                    self._report(ended)
            except (RuntimeError, ValueError):  # the store has ended with the rank that served it, usually rank 0
                if self._idle_seconds() > self._hang_seconds:
                    idle = f"{self._idle_seconds():.0f} s"
                    self._end(f"rank {self._rank} has made no progress for {idle}, and rank 0 has ended")

    def _idle_seconds(self) -> float:
        seen = (self._log.num_recorded, self._num_beats)
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at

    def _write_heartbeat(self) -> None:
        self._tick += 1
        heartbeat = Heartbeat(self._tick, self._idle_seconds(), self._log.num_recorded, str(self._log.last or "none"))
        self._store.set(f"watch/{self._rank}", json.dumps(asdict(heartbeat)))

    def _report(self, ended: threading.Event) -> None:
        """End the job if no rank makes progress. One rank at a time does this: it alone has counted itself first."""
        # The heartbeats are read twice, three polls apart: every process that still runs has written a new one.
        before = self._heartbeats()
        for _ in range(3):
            if ended.wait(self._poll_seconds):
                return
            self._write_heartbeat()
        if verdict := find_culprits(before, self._heartbeats(), self._hang_seconds, self._size):
            # The verdict is set before this process ends, so that the other ranks end with the same reason.
            self._store.set("watch/verdict", verdict)
            self._end(verdict)
        self._store.delete_key("watch/num_reporters")  # a rank makes progress: another may look again later
        self._seen_at = time.monotonic() - self._hang_seconds / 2

    def _end(self, reason: str) -> None:
        """End this process with the reason, from a thread: the main one may never leave a collective."""
        # The line is printed before `on_abort`, which may take long or fail, and both before the process ends.
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
        self._on_abort(reason)
        os._exit(EXIT_CODE)

    def _heartbeats(self) -> dict[int, Heartbeat]:
        keys = {rank: f"watch/{rank}" for rank in range(self._size)}
        return {r: Heartbeat(**json.loads(self._store.get(key))) for r, key in keys.items() if self._store.check([key])}


def find_culprits(
    before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat], hang_seconds: float, size: int
) -> str | None:
    """Return a line that names the ranks for which the others wait; None if a rank still makes progress.

    `before` and `after` are heartbeats by rank, read a few polls apart.
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
