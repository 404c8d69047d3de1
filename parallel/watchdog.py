"""A rank that hangs is named, with its last collective, and the job ends: a launcher can start it again.

A thread of each rank tells in the launcher's store what its rank has done last. A rank that does nothing for long looks
at what the others have told. While any of them makes progress it waits; where none does, the culprit is the one that
tells nothing any more, or the one with the fewest collectives: the others wait for it in their next one.
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
POLLS = 10  # within the time after which a rank counts as hanging


@dataclass(frozen=True)
class Sign:
    """What a rank tells of itself. `tick` grows for as long as its process lives."""

    tick: int
    idle_seconds: float
    num_collectives: int
    last: str


class Watchdog:
    """`hang_seconds`: without a collective, or a `beat`, on any rank, after which the job ends; 0: never.

    `on_abort` is called with the reason, in a thread, on every rank that can still do so before its process ends.
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
        """Progress that no collective shows. From any thread."""
        self._num_beats += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        ended = threading.Event()
        self._seen_at = time.monotonic()
        thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        if self._hang_seconds:
            self._tell()
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
                self._tell()
                if self._store.check(["watch/verdict"]):
                    self._on_abort(self._store.get("watch/verdict").decode())
                    os._exit(EXIT_CODE)
                if self._idle_seconds() > self._hang_seconds and self._store.add("watch/num_reporters", 1) == 1:
                    self._report(ended)
            except (RuntimeError, ValueError):  # the store went with the rank that held it, and the job will too
                if self._idle_seconds() > self._hang_seconds:
                    idle = f"{self._idle_seconds():.0f} s"
                    self._end(f"rank {self._rank} has made no progress for {idle}, and rank 0 is gone")

    def _idle_seconds(self) -> float:
        seen = (self._log.num_recorded, self._num_beats)
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at

    def _tell(self) -> None:
        self._tick += 1
        sign = Sign(self._tick, self._idle_seconds(), self._log.num_recorded, str(self._log.last or "none"))
        self._store.set(f"watch/{self._rank}", json.dumps(asdict(sign)))

    def _report(self, ended: threading.Event) -> None:
        before = self._signs()
        for _ in range(3):
            if ended.wait(self._poll_seconds):
                return
            self._tell()
        if verdict := find_culprits(before, self._signs(), self._hang_seconds, self._size):
            self._store.set("watch/verdict", verdict)
            self._end(verdict)
        self._store.delete_key("watch/num_reporters")  # somebody works: look again later
        self._seen_at = time.monotonic() - self._hang_seconds / 2

    def _end(self, reason: str) -> None:
        """The main thread may be inside a collective for ever: no exception would reach it."""
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
        self._on_abort(reason)
        os._exit(EXIT_CODE)

    def _signs(self) -> dict[int, Sign]:
        told = {rank: f"watch/{rank}" for rank in range(self._size)}
        return {r: Sign(**json.loads(self._store.get(key))) for r, key in told.items() if self._store.check([key])}


def find_culprits(before: Mapping[int, Sign], after: Mapping[int, Sign], hang_seconds: float, size: int) -> str | None:
    """Who holds up the others, in words; None where somebody still makes progress."""
    silent = [rank for rank in range(size) if rank not in after or before.get(rank) == after[rank]]
    alive = {rank: sign for rank, sign in after.items() if rank not in silent}
    if any(sign.idle_seconds < hang_seconds / 2 for sign in alive.values()):
        return None
    if silent:
        culprits, what = silent, "does not answer"
    else:
        fewest = min(sign.num_collectives for sign in alive.values())
        culprits = [rank for rank, sign in alive.items() if sign.num_collectives == fewest]
        what = f"has made no progress for {hang_seconds:g} s"
    lasts = "; ".join(f"rank {rank} {what}; its last collective: {_last(after, rank)}" for rank in culprits[:4])
    more = f"; and {len(culprits) - 4} ranks more" if len(culprits) > 4 else ""
    return f"{lasts}{more}; the job ends (run.hang_seconds={hang_seconds:g})"


def _last(signs: Mapping[int, Sign], rank: int) -> str:
    return f"{signs[rank].last}, number {signs[rank].num_collectives}" if rank in signs else "unknown"
