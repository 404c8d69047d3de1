"""Saves the checkpoints of a run: zero/state/writer.py writes them, and the newest are kept."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpt.build.train_state import TrainState
from gpt.checkpoint.checkpoint import rank_state
from gpt.checkpoint.folder import LATEST, checkpoint_name, delete_old, set_aside
from gpt.checkpoint.layout import Progress, content_of, name_of
from zero.state.sealed_file import replace_text
from zero.state.writer import CheckpointWriter, Publication

REMEDY = "make room or choose another run.dir (the checkpoint before it is untouched)"


class Saver:
    """A saver of checkpoints of `state` to `folder`, in which the newest `keep` checkpoints remain.

    All ranks make the same calls. `data` has the settings that determine the order of samples. In another thread,
    `on_chunk` is called whenever a few megabytes have been written, and on the first rank `on_complete` with each
    checkpoint, as soon as it is complete.
    """

    def __init__(
        self,
        folder: Path,
        state: TrainState,
        *,
        keep: int,
        is_async: bool,
        data: Mapping[str, Any] | None = None,
        on_chunk: Callable[[], None] = lambda: None,
        on_complete: Callable[[Path], None] = lambda checkpoint: None,
    ):
        self._folder, self._state, self._keep, self._data = folder, state, keep, data or {}
        publication = Publication(self._publish, REMEDY, self._delete_old, on_complete)
        self._writer = CheckpointWriter(state.mesh, state.device, publication, is_async=is_async, on_chunk=on_chunk)

    def name_run(self) -> str:
        """Return a random name for a run that begins, the same on all ranks."""
        return self._writer.store.compare_set("run", "", secrets.token_hex(6)).decode()

    def start(self, progress: Progress) -> None:
        """Begin to save. Call `wait` before the next save.

        If the saver is asynchronous, this returns when the state is copied, and training may change the state.
        Otherwise it returns when this rank's file is written.
        """
        final, state = self._folder / checkpoint_name(progress.step), rank_state(self._state)
        layout = state.describe(content_of(self._state, progress, self._data))
        key = self._writer.new_key(final)
        self._writer.start(key, final, state.tensors(), layout, name_of(progress), f"of step {progress.step}")

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

    def _delete_old(self) -> None:
        delete_old(self._folder, self._keep)
