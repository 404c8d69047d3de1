"""Checkpoints: how a run saves one, and how a run with any stage, tensor size and number of ranks resumes from it.

    RUN/checkpoints/step-00000100/layout.json              where each tensor is stored, and the progress of the run
                                  rank-00000.safetensors   the flat shards that rank 0 owns, and what every rank writes
    RUN/checkpoints/latest              the name of the newest checkpoint, for people; a resume takes the highest step

Every rank writes its random states, and what is not sharded: the module's buffers, the loss scale, counters and the
state of the loss guard. Shards are written by the first of the ranks that own the same ones.
`zero/checkpoint/writer.py` writes the files, `zero/checkpoint/rank_state.py` loads them, and
`gpt/checkpoint/folder.py` finds them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpt.builder.train_state import TrainState
from gpt.checkpoint.folder import LATEST, Kept, checkpoint_name, checkpoints, delete_old, set_aside, step_in_name
from gpt.checkpoint.layout import (
    TOKENIZER,
    Progress,
    SavedRun,
    changed_data,
    check_model,
    check_tokenizer,
    content_of,
    read_run,
)
from gpt.run_folder.files import written_if_possible
from gpt.shape.config import ModelConfig
from parallel.validation.errors import ConfigError
from zero.checkpoint.layout_file import is_complete, writer_of
from zero.checkpoint.rank_state import RankState, damaged_on_all
from zero.checkpoint.sealed_file import DamageError, flush_folder, replace_text
from zero.checkpoint.writer import CheckpointWriter, Publication

logger = logging.getLogger(__name__)
TO_DISK = Publication("make room or choose another run.dir (the checkpoint before it is untouched)")


def rank_state(state: TrainState) -> RankState:
    """Return what a rank of the run saves and loads."""
    of_guard = state.guard.state() if state.guard else {}
    return RankState(state.model, state.optimizer, {f"guard.{name}": tensor for name, tensor in of_guard.items()})


class RunSaver(CheckpointWriter):
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
        self._folder, self._config, self._data = folder.resolve(), state.config, data or {}
        publication = replace(publication, publish=self._publish, tidy=partial(delete_old, self._folder, kept))
        super().__init__(rank_state(state), publication, is_async=is_async)

    def start(self, progress: Progress) -> None:
        """Begin to save, as `CheckpointWriter.begin`."""
        final, title = self._folder / checkpoint_name(progress.step), f"of step {progress.step}"
        self.begin(final, content_of(self._config, progress, self._data), progress.save_name, title)

    def _publish(self, partial: Path, final: Path) -> None:
        # It is of an earlier run, or of a save of this step that failed after its rename. A crash before the next line
        # leaves the checkpoint of an earlier step as the newest.
        if final.exists():
            set_aside(self._folder, [final])
        partial.rename(final)
        flush_folder(self._folder)
        # After the checkpoint has its name: `latest` never names one that is not complete.
        with written_if_possible(self._folder / LATEST):
            replace_text(self._folder / LATEST, final.name)


def load(
    checkpoint: Path,
    state: TrainState,
    data: Mapping[str, Any] | None = None,
    samples_before: Callable[[int], int] = lambda step: 0,
) -> Progress:
    """Load the checkpoint into `state` and return its progress.

    The run then continues as it would have without the interruption: bit for bit with the same stage, mesh and buckets,
    if all kernels are deterministic, which on a GPU fused attention is not; up to rounding otherwise. The ranks share
    the verification of all files by checksum. A warning is logged for each of the settings `data`, which determine the
    order of samples, that has changed. Raises DamageError if the checkpoint is damaged, and ConfigError if it holds
    another model.
    `load_foreign` loads that of another program, where `samples_before` has its meaning.
    """
    if writer := writer_of(checkpoint):
        from gpt.checkpoint.foreign import load_foreign

        return load_foreign(checkpoint, writer, state, samples_before)
    own = rank_state(state)
    with _remedy_in_errors(checkpoint):
        saved = damaged_on_all(own.mesh, lambda: read_run(checkpoint))
    check_run(checkpoint, saved, own, state.config, data or {})
    with _remedy_in_errors(checkpoint):
        own.load(checkpoint, saved.layout, saved.progress.save_name)
    return saved.progress


def check_run(checkpoint: Path, saved: SavedRun, own: RankState, config: ModelConfig, data: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `saved` is of this model, and warn of each of the settings `data` that has changed."""
    own.check_fits(checkpoint, saved.layout, "take model.* from its config.yaml, or another run.dir")
    check_model(checkpoint, saved.model, config)
    if TOKENIZER in data:
        remedy = "prepare the data with its tokenizer, or choose another run.dir"
        check_tokenizer(checkpoint, saved.layout["data"], data[TOKENIZER], remedy)
    for change in changed_data(saved.layout["data"], data, saved.progress.mixture is not None):
        logger.warning("%s", change)


@contextmanager
def _remedy_in_errors(checkpoint: Path) -> Iterator[None]:
    """Add to the message of a ConfigError what to do about a damaged checkpoint."""
    try:
        yield
    except ConfigError as error:
        raise (DamageError if isinstance(error, DamageError) else ConfigError)(
            f"{error}; {_remedy(checkpoint)}"
        ) from error


def _remedy(damaged: Path) -> str:
    """Return what to do about a damaged checkpoint."""
    damaged_step = step_in_name(damaged) or 0
    found = checkpoints(damaged.parent)
    before = [path for step, path in found.items() if step < damaged_step and is_complete(path)]
    if before:
        return f"resume from the checkpoint before it with --checkpoint.resume={before[-1]}"
    return "there is no checkpoint before it; start from the beginning with --checkpoint.resume=never"
