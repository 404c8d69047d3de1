"""A graceful stop: if any rank receives a signal, from a scheduler or a person, all ranks end after the same step.

A thread of each rank polls the launcher's store, so that the ranks agree without a collective and without blocking the
device:

    1. A rank that receives a signal sets "stop/asked".
    2. Every rank that reads it reports how many steps it has begun, and begins no other one before the last is known.
    3. The last step is the highest one reported: no rank is beyond it, and every rank can still reach it.

Steps are counted by their begins, which are as many on all ranks: a run that rolls back repeats numbers of steps.

The ranks agree in the same way on a step after which they save, when the first rank finds that the last save was long
ago. It is the step after the highest one reported: so every rank knows it before it begins that step.
"""

import atexit
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from parallel.ending import EXIT_ABORTED, end_process
from parallel.world import STEP_NOTE, UNFINISHED_NOTE, note_for_launcher, start_of_launch

# Slurm sends SIGUSR1 before the time of a job is over; SIGINT is Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
WARNINGS = (signal.SIGUSR1,)  # which end no process of a launch
SAME_SECONDS = 2.0  # in which further signals count as one: a launcher passes on what its ranks have received as well
POLL_SECONDS = 0.5
RANKS_PER_POLL, MOST_POLLS = 256, 8  # a rank of a larger world polls less often, at most so many times
AGREEMENT_SECONDS = 10.0  # if a rank dies, torchrun sends the others SIGTERM, and SIGKILL 30 s later: must be less


def poll_seconds(num_ranks: int) -> float:
    """Return the time between two polls of a rank: the store has to answer all of them."""
    return POLL_SECONDS * min(MOST_POLLS, max(1.0, num_ranks / RANKS_PER_POLL))


class Agreement:
    """A step on which the ranks agree, `num_later` after the highest that any of them had begun when it was asked."""

    def __init__(self, store: dist.Store, rank: int, size: int, key: str, num_later: int = 0):
        self._store, self._rank, self._size, self._key, self._num_later = store, rank, size, key, num_later
        self.reported_at: float | None = None
        self.step: int | None = None

    @property
    def is_under_way(self) -> bool:
        """True if this rank has reported, and the step is not known yet: it may then begin no other one."""
        return self.reported_at is not None and self.step is None

    def ask(self) -> None:
        self._store.set(f"{self._key}/asked", "")

    def is_asked(self) -> bool:
        return self._store.check([f"{self._key}/asked"])

    def report(self, num_begun: int) -> None:
        # The step is set before this rank is counted: the rank that completes the count finds the steps of all.
        self._store.set(f"{self._key}/step/{self._rank}", str(num_begun))
        if self._store.add(f"{self._key}/num_reports", 1) == self._size:
            steps = self._store.multi_get([f"{self._key}/step/{rank}" for rank in range(self._size)])
            self._store.set(f"{self._key}/last", str(max(map(int, steps)) + self._num_later))

    def read(self) -> int | None:
        return int(self._store.get(f"{self._key}/last")) if self._store.check([f"{self._key}/last"]) else None


class Stopping:
    """A handler of signals: the first one asks all ranks to stop, a later one but a warning ends this process at once.

    With `save_seconds` above 0, the ranks agree to save when so much time has passed since the last call of `saved`.

    If not all ranks report their step in time after the first signal, this process ends too: a rank has died, and a
    collective with it would never complete, or the launcher has, and with its store the ranks cannot agree. `on_abort`
    is then called with the reason, in the thread, before the process ends. All ranks share `store`, which must be empty
    when the job starts.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        on_abort: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
        save_seconds: float = 0.0,
    ):
        self._on_abort, self._clock = on_abort, clock
        self._store, self._rank, self._size = store, rank, size
        self._changed = threading.Condition()
        self._step = self._num_begun = self._num_saves = 0
        self._stop, self._save = Agreement(store, rank, size, "stop"), self._next_save()
        self._save_seconds, self._saved_at = save_seconds, clock() if save_seconds else 0.0

    def may_begin(self, step: int) -> bool:
        """Return False if the step before was the last one. Call it before every step; blocks while ranks agree."""
        with self._changed:
            # A rank that has reported its step begins no other one before the agreed one is known: a later one could be
            # beyond it.
            self._changed.wait_for(lambda: not self._stop.is_under_way and not self._save.is_under_way)
            if self._stop.step is not None and self._num_begun >= self._stop.step:
                if self._rank == 0:
                    note_for_launcher(UNFINISHED_NOTE)
                return False
            # Written under the lock that `agree` takes before it reports this number: no step can begin in between.
            self._num_begun += 1
            self._step = step
            return True

    def is_save_due(self) -> bool:
        """Return whether the ranks have agreed to save after the step that is done. All ranks call it after each."""
        if self._save.step != self._num_begun:
            return False
        self.saved()
        self._num_saves += 1
        self._save = self._next_save()
        return True

    def saved(self) -> None:
        """Begin to count the time to the next save."""
        self._saved_at = self._clock()

    def _next_save(self) -> Agreement:
        return Agreement(self._store, self._rank, self._size, f"save/{self._num_saves}", num_later=1)

    def request(self) -> None:
        """Ask all ranks to stop. May be called from any thread."""
        self._stop.ask()

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle the signals in this block, and restore their handlers after it. Only the main thread may call this."""
        receiving, sending = os.pipe()
        os.set_blocking(sending, False)
        # A shell that starts a job in the background lets it ignore Ctrl-C.
        ignored = {signal.SIGINT} if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else set()
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS if number not in ignored}
        # The handlers are set before the pipe: without one, a signal would end the process. They do nothing, because
        # Python runs them between bytecodes, which a main thread in a collective does not reach. The interpreter writes
        # each signal's number to the pipe at once, also during a collective.
        wakeup_before = signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
        # A launcher holds warnings back until now; after this block they do nothing any more.
        mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(receiving, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            # In the reverse order: signals are no longer written to the pipe when the handlers change, and the thread
            # that reads the pipe has ended before the pipe is closed.
            signal.set_wakeup_fd(wakeup_before)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if number in mask_before else handler or signal.SIG_DFL)
            ended.set()
            thread.join()
            os.close(receiving)
            os.close(sending)

    def _watch(self, receiving: int, ended: threading.Event) -> None:
        asked_at: float | None = None  # time of the first signal
        noted = 0
        signals = select.poll()  # not `select`, which takes no descriptor above 1,023
        signals.register(receiving, select.POLLIN)
        while not ended.is_set():
            agrees = self._stop.is_under_way or self._save.is_under_way  # and no step begins before they have
            if signals.poll(1000 * (POLL_SECONDS if agrees else poll_seconds(self._size))):
                received = [number for number in os.read(receiving, 64) if number in SIGNALS]
                if received and asked_at is None:
                    asked_at = self._clock()
                    attempt(self.request)
                elif set(received) - set(WARNINGS) and self._clock() > (asked_at or 0.0) + SAME_SECONDS:
                    end_process(128 + received[-1])
            attempt(self.agree)
            if self._rank == 0 and self._step > noted and start_of_launch():
                noted = self._step
                note_for_launcher(STEP_NOTE, str(noted))
            # Without the store this rank reports no step: the time then counts from the signal.
            since = asked_at if self._stop.reported_at is None else self._stop.reported_at
            if self._stop.step is None and since is not None and self._clock() > since + AGREEMENT_SECONDS:
                self._abort()

    def _abort(self) -> None:
        """End this process from the polling thread."""
        reason = (
            f"rank {self._rank} was asked to stop in step {self._step}, and not all {self._size} ranks "
            f"have answered within {AGREEMENT_SECONDS:g} s: one of them, or the launcher, has ended"
        )
        end_process(EXIT_ABORTED, reason, partial(self._on_abort, reason))

    def agree(self) -> None:
        """Report the present step if a stop or a save was asked for, and read the agreed one if all have reported."""
        self._take_part(self._stop)
        if self._save_seconds:
            save = self._save  # before the time is read: the next one must not be asked for by the time of this one
            if self._rank == 0 and save.reported_at is None and self._clock() - self._saved_at >= self._save_seconds:
                save.ask()
            self._take_part(save)

    def _take_part(self, agreement: Agreement) -> None:
        if agreement.step is not None or not agreement.is_asked():
            return
        if agreement.reported_at is None:
            # First `reported_at`, so that the main thread begins no later step; then the step is reported.
            with self._changed:
                agreement.reported_at = self._clock()
            agreement.report(self._num_begun)
        if (step := agreement.read()) is not None:
            with self._changed:
                agreement.step = step
                self._changed.notify_all()


def attempt(action: Callable[[], None]) -> None:
    """Try an action on the store. It fails if the rank or the launcher that serves the store has ended."""
    try:
        action()
    except (RuntimeError, ValueError):
        time.sleep(POLL_SECONDS)


def take_warnings(handler: Callable[[int], object]) -> None:
    """Let a launcher pass a scheduler's warnings on: by default Slurm signals no other process of the job.

    Ranks that this thread starts from now on hold them back until they can handle them. A SIGTERM that scripts/launch
    has made this process ignore is passed on too. A rank that gets a signal twice takes it as one.
    """
    for number in (*WARNINGS, *[signal.SIGTERM] * (signal.getsignal(signal.SIGTERM) == signal.SIG_IGN)):
        signal.signal(number, lambda received, _frame: handler(received))
    atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)  # Python, as it ends, lets it end the process
    signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)

    def wait() -> None:
        while True:
            handler(signal.sigwait(WARNINGS))

    threading.Thread(target=wait, daemon=True).start()
