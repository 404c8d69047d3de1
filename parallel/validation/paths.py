"""Paths as users write them, and paths that may be links: what a link names is never removed or written."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

HOME = r"^([\d.]+:)?(~[^/]*)"  # of WEIGHT:PREFIX, too
UNKNOWN = re.compile(rf"{HOME}|\$\w|\$\{{")


def expanded(path: str) -> str:
    """Return the path with ~ and variables such as $HOME replaced. Raises ValueError if one is not known."""
    found = re.sub(HOME, lambda match: (match[1] or "") + os.path.expanduser(match[2]), os.path.expandvars(path))
    if UNKNOWN.search(found):
        raise ValueError(f"{path} has a user or a variable that is not known")
    return found


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
