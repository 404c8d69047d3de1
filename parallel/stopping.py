"""An orderly stop: all ranks end after the same step if any of them receives a signal, from a scheduler or a person.

A thread of each rank polls the launcher's store, so it takes neither a collective nor a wait for the device.

    one rank     receives a signal                  -> sets "asked"
    every rank   reads it, reports its present step, and begins no later one until the last step is known
    all          the highest step reported is the last one: no rank is beyond it, and every rank can still reach it
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # Slurm sends SIGUSR1 before the time of a job is over
POLL_SECONDS = 0.5
AGREEMENT_SECONDS = 10.0  # below the 30 s from torchrun's SIGTERM to the peers of a dead rank to its SIGKILL


class Stopping:
    """A handler of signals: the first one asks all ranks to stop, and a second one ends this process at once.

    The first one also ends it if not all ranks answer in time: one of them has died, and a collective with it would
    never complete. `on_abort` is then called with the reason, in a thread, before the process ends. `store` is shared
    by the ranks and empty when a job starts.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, on_abort: Callable[[str], None] = lambda reason: None):
        self._on_abort = on_abort
        self._store, self._rank, self._size = store, rank, size
        self._changed = threading.Condition()
        self._begun = 0
        self._reported_at: float | None = None
        self._last: int | None = None

    def may_begin(self, step: int) -> bool:
        """Return False if the step before was the last one. Call it before every step; blocks while ranks agree."""
        with self._changed:
            # A rank that has reported its step begins no later one before the last step is known: it could be beyond.
            if self._reported_at is not None and step > self._begun:
                self._changed.wait_for(lambda: self._last is not None)
            if self._last is not None and step > self._last:
                return False
            # Under the same lock as the report: the step that is reported is the one that has begun.
            self._begun = max(self._begun, step)
            return True

    def request(self) -> None:
        """Ask all ranks to stop. May be called from any thread."""
        self._store.set("stop/asked", "")

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle the signals in this block, and restore their handlers after it. For the main thread."""
        receiving, sending = os.pipe()
        os.set_blocking(sending, False)
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        # Python's handlers are set first, so that no signal ends the process; they run only between bytecodes, which a
        # thread in a collective does not reach. The bytes in the pipe arrive during a collective too.
        wakeup_before = signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(receiving, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            # The reverse order: no byte is written any more when the handlers change, and the thread that reads the
            # pipe has ended when the pipe is closed.
            signal.set_wakeup_fd(wakeup_before)
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)
            ended.set()
            thread.join()
            os.close(receiving)
            os.close(sending)

    def _watch(self, receiving: int, ended: threading.Event) -> None:
        num_received = 0
        while not ended.is_set():
            if select.select([receiving], [], [], POLL_SECONDS)[0]:
                received = [number for number in os.read(receiving, 64) if number in SIGNALS]
                num_received += len(received)
                if num_received > 1:
                    os._exit(128 + received[-1])
                if received:
                    self._attempt(self.request)
            self._attempt(self._agree)
            if self._last is None and self._reported_at and time.monotonic() > self._reported_at + AGREEMENT_SECONDS:
                self._abort()

    def _abort(self) -> None:
        """End this process with the reason, from a thread: the main one may never leave a collective."""
        reason = (
            f"rank {self._rank} was asked to stop in step {self._begun}, and not all {self._size} ranks "
            f"have answered within {AGREEMENT_SECONDS:g} s: one of them has ended"
        )
        # The line is printed before `on_abort`, which may take long or fail, and both before the process ends.
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
        self._on_abort(reason)
        os._exit(1)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Try an action on the store; do nothing if it has ended with the rank that served it, which ends the job."""
        try:
            action()
        except (RuntimeError, ValueError):
            time.sleep(POLL_SECONDS)

    def _agree(self) -> None:
        """Report the present step if a stop was asked for, and read the last step if all ranks have reported."""
        if self._last is not None or not self._store.check(["stop/asked"]):
            return
        if self._reported_at is None:
            # The main thread is kept from a later step before the present one is reported; the step is set before this
            # rank is counted: the rank that counts all of them reads all steps.
            with self._changed:
                self._reported_at = time.monotonic()
            self._store.set(f"stop/step/{self._rank}", str(self._begun))
            if self._store.add("stop/num_reports", 1) == self._size:
                steps = [int(self._store.get(f"stop/step/{rank}")) for rank in range(self._size)]
                self._store.set("stop/last", str(max(steps)))
        if self._store.check(["stop/last"]):
            with self._changed:
                self._last = int(self._store.get("stop/last"))
                self._changed.notify_all()
