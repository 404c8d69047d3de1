"""A lock on the folder of a run, so that one job at a time writes there.

The operating system holds the lock for the process and drops it when the process ends, however it ends.
"""

import logging
from pathlib import Path

from filelock import FileLock, Timeout

from data.errors import LOCKS_ARE_MISSING
from parallel.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK = "lock"


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
            self._lock.acquire()
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

    def release(self) -> None:
        """Release the lock, if it is held, so that another job may use the folder."""
        self._lock.release()
