"""The output of a preparation: written by one process at a time, into a hidden folder, and renamed when complete."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from data.errors import DataError

LOCKS_ARE_MISSING = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # errors of a file system without locks


@contextmanager
def reserved(output: Path) -> Iterator[None]:
    """Hold the lock of a prefix in this block. Raises DataError if another process holds it."""
    if output.name in ("", ".."):
        raise DataError(f"--output {output} names no files; give the beginning of their names, such as data/corpus")
    path = output.with_name(f".{output.name}.lock")
    # No fallback to a lock that consists in the existence of a file: it would outlive a process that is killed.
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise DataError(
            f"--output {output} is being written by another process, which holds {path}; wait, or choose another"
        ) from None
    except OSError as error:
        if error.errno not in LOCKS_ARE_MISSING:
            raise
    try:
        yield
    finally:
        # While the lock is held: a process that has opened the file meanwhile notices that it is no longer there.
        path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def staging_folder(output: Path) -> Iterator[Path]:
    """Make the hidden folder of a prefix, and remove it at the end, as well as one that a killed process has left."""
    folder = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
