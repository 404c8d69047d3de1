"""Paths that may be links: what this code removes or writes is never what a link names."""

import shutil
from contextlib import suppress
from pathlib import Path


def remove(path: Path) -> None:
    """Remove a file, a folder with all that it holds, or a link, but not what the link names. Errors are ignored."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


def unlink_link(path: Path) -> None:
    """Remove a link to a file, for which a write makes a file; a link to a folder stays."""
    if path.is_symlink() and not path.is_dir():
        path.unlink()
