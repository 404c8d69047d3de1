"""Saves the checkpoints of a run to its folder, in which the newest are kept."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpt.builder.train_state import TrainState
from gpt.checkpoint.checkpoint import rank_state
from gpt.checkpoint.folder import LATEST, Kept, checkpoint_name, delete_old, set_aside
from gpt.checkpoint.layout import Progress, content_of
from parallel.store import shared_store
from zero.state.sealed_file import replace_text
from zero.state.writer import CheckpointWriter, Publication

REMEDY = "make room or choose another run.dir (the checkpoint before it is untouched)"


class SaveOfRanks(NamedTuple):
    """The fields of a `Publication` that concern every rank."""

    on_chunk: Callable[[], None] = lambda: None
    on_written: Callable[[Path, bool], None] = lambda partial, is_written: None
    hosts: Sequence[int] = (0,)
    remedy: str = REMEDY
    make_room: Callable[[], None] = lambda: None


ONE_FOLDER = SaveOfRanks()


class RunSaver:
    """A saver of checkpoints of `state` to `folder`, in which `kept` says how many remain.

    All ranks make the same calls. `data` has the settings that determine the order of samples. In another thread,
    `on_complete` is called on the first rank with each checkpoint, as soon as it is complete.
    """

    def __init__(
        self,
        folder: Path,
        state: TrainState,
        *,
        kept: Kept,
        is_async: bool,
        data: Mapping[str, Any] | None = None,
        on_complete: Callable[[Path], None] = lambda checkpoint: None,
        of_ranks: SaveOfRanks = ONE_FOLDER,
    ):
        self._folder, self._config, self._data, self._state = folder, state.config, data or {}, rank_state(state)
        tidy = partial(delete_old, folder, kept)
        publication = Publication(self._publish, tidy=tidy, on_complete=on_complete, **of_ranks._asdict())
        self._writer = CheckpointWriter(self._state.mesh, self._state.device, publication, is_async=is_async)

    def start(self, progress: Progress) -> None:
        """Begin to save. Call `wait` before the next save.

        If the saver is asynchronous, this returns when the state is copied, and training may change the state.
        Otherwise it returns when this rank's file is written.
        """
        final, title = self._folder / checkpoint_name(progress.step), f"of step {progress.step}"
        layout = self._state.describe(content_of(self._config, progress, self._data))
        key = self._writer.new_key(final)
        self._writer.start(key, final, self._state.tensors(), layout, progress.save_name, title)

    def wait(self) -> Path | None:
        """Wait until the save that `start` began is complete, and return its folder, or None if there is none.

        Raises SaveError on all ranks if it failed on any.
        """
        return self._writer.wait()

    def _publish(self, partial: Path, final: Path) -> None:
        if final.exists():  # the run has not written it: it set aside all checkpoints of steps to come
            set_aside(self._folder, [final])
        partial.rename(final)
        # After the checkpoint has its name: `latest` never names one that is not complete.
        replace_text(self._folder / LATEST, final.name)


def name_run() -> str:
    """Return a random name for a run that begins, the same on all ranks."""
    return shared_store().compare_set("run", "", secrets.token_hex(6)).decode()
