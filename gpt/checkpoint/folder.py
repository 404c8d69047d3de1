"""The folder of a run's checkpoints: their names, which of them is the newest, and which are kept.

step-00000100             a checkpoint; a folder of another name, such as step-00000100-backup, is none
.step-00000200.partial    is being written, or was when the job ended
old-2-step-00000150       set aside: the run went back behind its step, for the second time
latest                    the name of the newest checkpoint, for people and other programs
began_from                the folder that checkpoint.resume named when this run began there
"""

import logging
import math
import re
from pathlib import Path
from typing import NamedTuple

from parallel.validation.errors import ConfigError
from parallel.validation.files import read_note
from parallel.validation.paths import remove
from parallel.world import is_restart
from zero.checkpoint.layout_file import is_complete, no_checkpoint, writer_of
from zero.checkpoint.schema import shown
from zero.checkpoint.sealed_file import replace_text

logger = logging.getLogger(__name__)

LATEST, BEGAN_FROM = "latest", "began_from"
NAME = re.compile(r"step-([0-9]{8,})")
SET_ASIDE = re.compile(r"old-([0-9]+)-step-([0-9]{8,})")


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def step_in_name(path: Path) -> int | None:
    """Return the step of the checkpoint that has this name, or None if it is not the name of a checkpoint."""
    found = NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of the folder by their steps, in their order.

    One that is being written has another name, so one without layout.json is damaged.
    """
    return dict(sorted((int(found[1]), path) for found, path in _matches(folder, NAME)))


def newest(folder: Path, before: float = math.inf) -> Path | None:
    """Return the newest checkpoint of the folder of a step `before` another one, or None if there is none."""
    return next((path for step, path in reversed(checkpoints(folder).items()) if step < before), None)


def find(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint that the setting `checkpoint.resume` selects, or None to start from the beginning.

    Raises ConfigError if it is the name of a folder that holds no complete checkpoint, also not of another program.
    """
    if resume == "never":
        return None
    if resume == "auto":
        found = newest(folder)
        _warn_if_latest_differs(folder, found)
        return found
    if not is_complete(Path(resume)) and not writer_of(Path(resume)):
        raise ConfigError(f"checkpoint.resume={shown(resume)[1:-1]} {no_checkpoint(Path(resume))}, or choose auto")
    return Path(resume)


def goes_on(folder: Path, resume: str) -> bool:
    """Return whether a start with `checkpoint.resume` goes on with what the run of the folder has saved.

    A run begins once at the checkpoint of another run that `resume` names. With `never`, and with one of its own, it
    begins anew at each start, but not if the launcher or the scheduler restarts it.
    """
    if resume == "auto":
        return True
    if resume == "never" or _is_in(folder, Path(resume)):
        return is_restart()
    return read_note(folder / BEGAN_FROM) == str(Path(resume).absolute())


def _is_in(folder: Path, checkpoint: Path) -> bool:
    return checkpoint.parent.resolve() == folder.resolve()


def find_to_train(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint from which a start of the run of the folder goes on, or None to start from the beginning.

    Raises ConfigError as `find`.
    """
    if resume != "auto" and goes_on(folder, resume) and (found := newest(folder)):
        return found
    return find(folder, resume)


def begin_from(folder: Path, resume: str, step: int) -> None:
    """Set aside what the run of the folder has saved and will not go on with: it begins after `step`.

    If `checkpoint.resume` names the checkpoint of another run, that is all that it has, and the name is kept.
    """
    if resume in ("auto", "never") or _is_in(folder, Path(resume)):
        set_aside_later(folder, step)
    elif not goes_on(folder, resume):
        set_aside_later(folder, -1)
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / BEGAN_FROM, str(Path(resume).absolute()))
    else:
        set_aside_later(folder, step)
    if resume == "never":
        remove(folder / BEGAN_FROM)


def set_aside_later(folder: Path, step: int) -> None:
    """Rename the checkpoints of steps after `step`, because the run will save these steps again."""
    set_aside(folder, [path for saved, path in checkpoints(folder).items() if saved > step])


def set_aside(folder: Path, paths: list[Path]) -> None:
    """Rename checkpoints of the folder, all with the same new number."""
    number = 1 + max((int(found[1]) for found, _ in _matches(folder, SET_ASIDE)), default=0)
    for path in paths:
        path.rename(path.with_name(f"old-{number}-{path.name}"))


class Kept(NamedTuple):
    """The checkpoints that remain in a folder: the newest, and those of each `every`-th step (0: none)."""

    newest: int
    every: int = 0


def delete_old(folder: Path, kept: Kept) -> None:
    """Delete the checkpoints that are not kept, and all but the `kept.newest` that were set aside last."""
    old = sorted((int(found[1]), int(found[2]), path) for found, path in _matches(folder, SET_ASIDE))
    _keep_newest([p for step, p in checkpoints(folder).items() if not kept.every or step % kept.every], kept.newest)
    _keep_newest([path for _, _, path in old], kept.newest)


def _keep_newest(folders: list[Path], keep: int) -> None:
    """Delete all but the last `keep` folders."""
    for path in folders[:-keep]:
        # Renamed first, so that a folder that is half deleted never looks like a complete checkpoint.
        doomed = path.with_name(f".{path.name}.partial")
        remove(doomed)
        remove(path.rename(doomed))


def remove_partial(folder: Path) -> None:
    """Delete what interrupted saves have left."""
    for path in folder.glob(".*.partial"):
        remove(path)


def _matches(folder: Path, name: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
    return [(found, path) for path in folder.glob("*") if (found := name.fullmatch(path.name))]


def _warn_if_latest_differs(folder: Path, found: Path | None) -> None:
    """Warn if the file `latest` exists, and names something else than the newest checkpoint."""
    text = read_note(folder / LATEST).strip()
    if text != (found.name if found else "none") and (folder / LATEST).exists():  # not if a crash came before it
        logger.warning("%s names %s, but the newest checkpoint is %s", folder / LATEST, shown(text), found or "none")
