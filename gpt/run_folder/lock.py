"""A lock on the folder of a run, so that one job at a time writes there.

The operating system holds the lock for the process and drops it when the process ends, however it ends. A file server
may not learn of the end of a node. So the holder writes the start of its launch beside the lock, and a later start of
the same launch, which begins when the earlier one has ended, takes the lock away from it.
"""

import logging
from pathlib import Path

from filelock import FileLock, Timeout

from data.errors import LOCKS_ARE_MISSING
from parallel.validation.errors import ConfigError
from parallel.validation.files import read_note
from parallel.validation.paths import unlink_link
from parallel.world import start_of_launch

logger = logging.getLogger(__name__)

LOCK, HOLDER = "lock", "lock.holder"


class RunLock:
    """The lock of one run's folder. The run's first rank holds it until the run ends."""

    def __init__(self, folder: Path):
        self._folder = folder
        # No fallback to a lock that consists in the existence of a file: it would outlive a process that is killed.
        self._lock = FileLock(folder / LOCK, blocking=False, fallback_to_soft=False)

    def take(self) -> None:
        """Take the lock unless this object holds it already, and make the folder if it does not exist.

        Raises ConfigError if another job holds the lock, or if nothing can be written to the folder.
        """
        if self._lock.is_locked:
            return
        try:
            for name in (LOCK, HOLDER):
                unlink_link(self._folder / name)
            try:
                self._lock.acquire()
            except Timeout:
                if not self._is_of_earlier_start():
                    raise
                (self._folder / LOCK).unlink(missing_ok=True)  # a lock belongs to a file, and not to its name
                self._lock.acquire()
            self._write_holder()
        except Timeout:
            raise ConfigError(
                f"run.dir={self._folder} is in use by another job, which holds {self._folder / LOCK}; wait until it "
                "ends, or choose another run.dir"
            ) from None
        except OSError as error:
            if error.errno not in LOCKS_ARE_MISSING:
                raise ConfigError(
                    f"run.dir={self._folder} cannot be written ({error.strerror}); choose another folder"
                ) from error
            logger.warning("%s cannot be locked (%s); do not start a second job there", self._folder, error.strerror)

    def _is_of_earlier_start(self) -> bool:
        """Return True if the lock was taken by a start of this launch that has ended."""
        launch, _, number = read_note(self._folder / HOLDER).partition(" ")
        own = start_of_launch()
        return own is not None and launch == own[0] and number.isdecimal() and int(number) < own[1]

    def _write_holder(self) -> None:
        if own := start_of_launch():
            (self._folder / HOLDER).write_text(f"{own[0]} {own[1]}")
        else:
            (self._folder / HOLDER).unlink(missing_ok=True)

    def release(self) -> None:
        """Release the lock, if it is held, so that another job may use the folder."""
        self._lock.release()
