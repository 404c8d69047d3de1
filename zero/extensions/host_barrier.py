"""A barrier on the host, by the launcher's store: for rare waits that must raise instead of hanging."""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from parallel.mesh import Axis
from parallel.store import has_failed_elsewhere, shared_store, withdraw_reason
from parallel.torch_internals import time_limit

logger = logging.getLogger(__name__)

FIRST_PAUSE, POLL_SECONDS = 0.005, 1.0  # after which a rank that waits asks again, at first and at last
SILENT_SECONDS = 10.0  # after which it says that it waits


class BrokenBarrier(RuntimeError):
    """An error of all ranks at the barrier: some did not reach it in time, or their purposes differ."""


class HostBarrier:
    """A reusable barrier of all ranks of an axis. All of them must create their barriers in the same order."""

    def __init__(self, axis: Axis, clock: Callable[[], float] = time.monotonic):
        self._axis, self._clock = axis, clock
        self._num_uses, self._is_telling, self._told_at = 0, False, -math.inf
        if axis.has_peers:
            self._store = shared_store()
            assert axis.group is not None
            self._limit = time_limit(axis.group).total_seconds() / 2
            group = f"{axis.group.group_name}/{dist.get_global_rank(axis.group, 0)}"
            # The n-th barrier that this rank creates on the group, and so the n-th of every rank.
            number = self._store.add(f"barriers/of/{group}/{dist.get_rank()}", 1)
            self._prefix = f"barriers/{group}/{number}"

    def tell(self, number: int, purpose: str) -> None:
        """Tell ranks that wait here that this one has gone on, without the barrier, to its round `number`.

        They hear of the last of several rounds in a second: a rank may run hundreds, and they look once a second.
        """
        if not self._axis.has_peers:
            return
        self._news = number, purpose
        if not self._is_telling:
            self._is_telling = True
            timer = threading.Timer(max(0.0, self._told_at + POLL_SECONDS - self._clock()), self._tell_now)
            timer.daemon = True
            timer.start()

    def _tell_now(self) -> None:
        self._is_telling, self._told_at = False, self._clock()  # before the news is read: later news are told later
        number, purpose = self._news
        # No two values of "told" are equal. Not a counter, for whose value this rank would wait.
        news = {f"gone/{self._axis.rank}": f"{number} {purpose}", "told": f"{number} of rank {self._axis.rank}"}
        with suppress(RuntimeError):  # the store's rank has ended
            self._store.multi_set([f"{self._prefix}/{key}" for key in news], list(news.values()))  # type: ignore[attr-defined]

    def wait(self, purpose: str, number: float = math.inf) -> None:
        """Return when every rank of the axis waits with this purpose; at once on an axis without peers.

        `purpose` completes the sentence "rank 0 ...". Raises BrokenBarrier as soon as a rank waits with another
        purpose, or tells that it has gone on to round `number`, or after half of a collective's timeout: ranks that did
        not enter the barrier may wait for this one in a collective, which must not time out first.
        """
        if not self._axis.has_peers:
            return
        self._axis.check_process()
        self._num_uses += 1
        own = f"{self._axis.name} rank {self._axis.rank} {purpose}"
        prefix = f"{self._prefix}/{self._num_uses}"
        # Each rank sets its purpose before it compares: the rank whose purpose differs is named with its purpose below.
        self._store.set(f"{prefix}/{self._axis.rank}", purpose)
        common = self._store.compare_set(f"{prefix}/purpose", "", purpose).decode()
        if common != purpose:
            self._store.set(f"{prefix}/end", f"{self._axis.rank}")
            raise BrokenBarrier(f"{own}, another rank {common}")
        # A rank is counted after its purpose was found to agree: if the last one is counted, all purposes agree.
        if self._store.add(f"{prefix}/arrived", 1) == self._axis.size:
            withdraw_reason()  # before any rank goes on, and may report another one
            self._store.set(f"{prefix}/end", "")
        self._wait_for_end(prefix, own, number)
        if other := self._store.get(f"{prefix}/end").decode():
            their_purpose = self._store.get(f"{prefix}/{other}").decode()
            raise BrokenBarrier(f"{own}, {self._axis.name} rank {other} {their_purpose}")
        # All ranks have arrived here, so none reads the keys of the use before this any more. The store would keep them
        # for the whole run.
        for key in (str(self._axis.rank), *(("purpose", "arrived", "end") if self._axis.rank == 0 else ())):
            self._store.delete_key(f"{self._prefix}/{self._num_uses - 1}/{key}")

    def _wait_for_end(self, prefix: str, own: str, number: float) -> None:
        begin, is_silent, pause, told = self._clock(), True, FIRST_PAUSE, ""
        # Not `wait` of the store: torch prints two lines whenever its time is over.
        while not self._is_set(f"{prefix}/end"):
            time.sleep(pause)
            pause = min(POLL_SECONDS, pause * 1.5)  # so it is about a third of the time that has passed
            if pause < POLL_SECONDS / 8:
                continue
            if has_failed_elsewhere():
                raise BrokenBarrier(f"{own}, and another rank has failed")
            # One key: with a key of each rank, N ranks that wait would ask for N^2 keys.
            if (newest := self._text(f"{self._prefix}/told")) != told and (gone := self._gone_to(number)):
                raise BrokenBarrier(f"{own}, {gone}")
            told = newest
            seconds = self._clock() - begin
            if seconds >= self._limit:
                raise BrokenBarrier(f"{own}, and {self._arrived(prefix)} within {self._limit:g} s")
            if is_silent and seconds >= SILENT_SECONDS:
                is_silent = False
                logger.warning(
                    "%s, and %s within %d s; it waits for the others, at most %g s",
                    *(own, self._arrived(prefix), seconds, self._limit),
                )

    def _gone_to(self, number: float) -> str:
        """Return which rank does what, if one has told that it has gone on to round `number`."""
        for rank in range(self._axis.size):
            theirs, _, purpose = self._text(f"{self._prefix}/gone/{rank}").partition(" ")
            if theirs and int(theirs) >= number:
                return f"{self._axis.name} rank {rank} {purpose}"
        return ""

    def _text(self, key: str) -> str:
        """Return the value of a key; nothing if it is not set."""
        return self._store.get(key).decode() if self._is_set(key) else ""

    def _is_set(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError:  # the store's rank has ended, which `has_failed_elsewhere` finds too
            return False

    def _arrived(self, prefix: str) -> str:
        return f"of {self._axis.size} ranks {self._store.add(f'{prefix}/arrived', 0)} did so"
