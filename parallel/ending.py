"""The ends of a rank: which mechanism ends it, when, and with which exit code. Each ends in `end_process`, or returns.

    code   mechanism                    ends a rank
    0      Stopping (stopping.py)       after a signal to any rank, when all have saved after the same step
    1      Stopping                     after a signal, if not all ranks answer in 10 s: one or the launcher has ended
    1      Python                       by an error of the program, with its traceback
    2      exit_as_rank (world.py)      by an error that the user can correct; also too little memory, bad losses, wrong
                                        replicas, and a last checkpoint that cannot be written
    3      exit_as_rank                 by a collective, or a save, that fails because another rank was lost
    3      Watchdog (watchdog.py)       when no rank makes progress for run.hang_seconds, as soon as there is a mesh
    128+n  Stopping                     by a second signal n; before the first step, by the first one
    134    NCCL                         by a collective that fails on a GPU

A restart can mend a rank that has ended with 3 or 134, and not one that has ended with 2: launchers count on it.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from parallel.validation.errors import printable

EXIT_ABORTED, EXIT_USER_ERROR, EXIT_LOST = 1, 2, 3


def end_process(code: int, reason: str = "", report: Callable[[], object] = lambda: None) -> NoReturn:
    """Print the reason, if there is one, call `report`, and end this process, from any thread, whatever fails.

    The main thread may never return from its collective. The line is printed first, because a report may take long.
    """
    try:
        with suppress(OSError):  # a full disk must not change the exit code
            sys.stderr.write(f"error: {printable(reason)}\n" if reason else "")
            sys.stderr.flush()
        report()
    finally:
        os._exit(code)
