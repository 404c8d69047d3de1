"""Signals of a scheduler to a launcher, which the ranks should get."""

import signal
from collections.abc import Callable
from types import FrameType


def take_warnings(handler: Callable[[int, FrameType | None], object]) -> None:
    """Let `handler` take the signals that scripts/launch has made this process ignore under a scheduler.

    By default Slurm signals only the process that it has started, so they have to be passed on. A rank that gets a
    signal twice takes it as one.
    """
    for number in (signal.SIGUSR1, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
