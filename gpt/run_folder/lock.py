"""One job at a time in a run's folder. The system drops the lock with the process that holds it, however that ends."""

import fcntl
import logging
import os
from pathlib import Path

from parallel.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK = "lock"


class RunLock:
    """Held by the first rank for as long as it trains."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._descriptor: int | None = None

    def take(self) -> None:
        """Make the folder if need be. Raises ConfigError where another job holds it, or nothing can be written."""
        if self._descriptor is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"run.dir={self._folder} cannot be written ({error.strerror}); choose another folder"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"run.dir={self._folder} is in use by another job, which holds {self._folder / LOCK}; wait for its "
                "end, or choose another run.dir"
            ) from None
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s): start no second job there", self._folder, error.strerror)
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
