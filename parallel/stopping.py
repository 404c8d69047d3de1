"""Leaving together, after the same step, when any rank is asked to: by a signal from a scheduler, or from a person.

No collective and no wait for the device: a thread of each rank watches the launcher's store.

    one rank     a signal arrives                      -> "somebody has been asked"
    every rank   sees that, tells the step it is in, and begins no later one until all have told theirs
    all          the highest step told is the last one: nobody is beyond it, and everybody can still reach it
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

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: Slurm's warning before the time is over
POLL_SECONDS = 0.5
AGREEMENT_SECONDS = 10.0  # torchrun sends SIGTERM to the peers of a dead rank, and SIGKILL only after 30


class Stopping:
    """Between `listening` and its end, the first signal asks all ranks to stop and a second one ends this one at once.

    So does the first where not all ranks answer: one has died, and what this one waits for will never come.

    `store` is shared by the ranks, and empty when a job starts. `on_abort` is called with the reason, in a thread,
    where not all ranks answer.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, on_abort: Callable[[str], None] = lambda reason: None):
        self._on_abort = on_abort
        self._store, self._rank, self._size = store, rank, size
        self._changed = threading.Condition()
        self._begun = 0
        self._told_at: float | None = None
        self._last: int | None = None

    def may_begin(self, step: int) -> bool:
        """Call before every step; false: the one before was the last."""
        with self._changed:
            if self._told_at is not None and step > self._begun:
                self._changed.wait_for(lambda: self._last is not None)
            if self._last is not None and step > self._last:
                return False
            self._begun = max(self._begun, step)
            return True

    def request(self) -> None:
        """Ask all ranks to stop. From any thread."""
        self._store.set("stop/asked", "")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals in this block; in the main thread. What they did before comes back at its end."""
        receiving, sending = os.pipe()
        os.set_blocking(sending, False)
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        # The bytes come when the main thread is in a collective too, where Python's own handlers have to wait.
        wakeup_before = signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(receiving, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
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
            if self._last is None and self._told_at and time.monotonic() > self._told_at + AGREEMENT_SECONDS:
                # The main thread may be inside a collective for ever: no exception would reach it.
                reason = (
                    f"rank {self._rank} was asked to stop in step {self._begun}, and not all {self._size} ranks "
                    f"have answered within {AGREEMENT_SECONDS:g} s: one of them is gone"
                )
                sys.stderr.write(f"error: {reason}\n")
                sys.stderr.flush()
                self._on_abort(reason)
                os._exit(1)

    def _attempt(self, action: Callable[[], None]) -> None:
        """A store that is gone went with the rank that held it: the job ends by that, not by this."""
        try:
            action()
        except (RuntimeError, ValueError):
            time.sleep(POLL_SECONDS)

    def _agree(self) -> None:
        if self._last is not None or not self._store.check(["stop/asked"]):
            return
        if self._told_at is None:
            with self._changed:
                self._told_at = time.monotonic()
            self._store.set(f"stop/step/{self._rank}", str(self._begun))
            if self._store.add("stop/num_told", 1) == self._size:
                steps = [int(self._store.get(f"stop/step/{rank}")) for rank in range(self._size)]
                self._store.set("stop/last", str(max(steps)))
        if self._store.check(["stop/last"]):
            with self._changed:
                self._last = int(self._store.get("stop/last"))
                self._changed.notify_all()
