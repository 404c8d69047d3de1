"""Saves the checkpoints of a run to its folder, in which the newest are kept."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpt.builder.train_state import TrainState
from gpt.checkpoint.checkpoint import rank_state
from gpt.checkpoint.folder import LATEST, Kept, checkpoint_name, delete_old, set_aside
from gpt.checkpoint.layout import Progress, content_of
from zero.state.sealed_file import replace_text
from zero.state.writer import CheckpointWriter, Publication

TO_DISK = Publication("make room or choose another run.dir (the checkpoint before it is untouched)")


class RunSaver:
    """A saver of checkpoints of `state` to `folder`, in which `kept` says how many remain.

    All ranks make the same calls. `data` has the settings that determine the order of samples. The names and the number
    of checkpoints are added to `publication`.
    """

    def __init__(
        self,
        folder: Path,
        state: TrainState,
        *,
        kept: Kept,
        is_async: bool,
        data: Mapping[str, Any] | None = None,
        publication: Publication = TO_DISK,
    ):
        self._folder, self._config, self._data = folder, state.config, data or {}
        publication = replace(publication, publish=self._publish, tidy=partial(delete_old, folder, kept))
        self._writer = CheckpointWriter(rank_state(state), publication, is_async=is_async)

    def start(self, progress: Progress) -> None:
        """Begin to save, as `CheckpointWriter.start`."""
        final, title = self._folder / checkpoint_name(progress.step), f"of step {progress.step}"
        self._writer.start(final, content_of(self._config, progress, self._data), progress.save_name, title)

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
