"""Recovery of a run: checkpoints that it saves, resumes from and rolls back to, and the lock on its folder."""

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.builder.train_state import TrainState
from gpt.checkpoint.checkpoint import TO_DISK, RunSaver, load
from gpt.checkpoint.folder import (
    Kept,
    begin_from,
    checkpoint_name,
    find_to_train,
    goes_on,
    newest,
    remove_partial,
    step_in_name,
)
from gpt.checkpoint.layout import Progress
from gpt.run_folder.files import CHECKPOINTS, CONFIG, WEIGHTS, cut_metrics, read_name, start_run
from gpt.run_folder.lock import RunLock
from gpt.settings.run import CheckpointSettings
from parallel.store import Decisions, shared_store
from parallel.validation.errors import ConfigError
from zero.checkpoint.sealed_file import DamageError
from zero.checkpoint.writer import SaveError, comes_true

logger = logging.getLogger(__name__)


class Recovery:
    """The checkpoints of a run and the lock on its folder. All ranks make the same calls.

    `data` has the settings that determine the order of samples. `say` prints a line about each checkpoint that was
    saved or loaded. `on_chunk` is called whenever a few megabytes have been written, and on the first rank `on_save`
    with the folder of each complete checkpoint; both in another thread. There, too, the attribute `on_failure` is
    called with the reason if a checkpoint, a snapshot or an export of weights could not be written.
    """

    def __init__(
        self,
        config: CheckpointSettings,
        run_dir: Path,
        state: TrainState,
        data: Mapping[str, Any],
        say: Callable[[str], None],
        on_chunk: Callable[[], None],
        on_save: Callable[[Path], None],
    ):
        self._config, self._run_dir = config, run_dir
        self._state, self._data, self._say = state, data, say
        self.on_failure: Callable[[str], None] = lambda reason: None
        self._is_first = state.mesh.rank == 0
        self._lock, kept = RunLock(self._run_dir), Kept(config.keep, config.keep_every)

        def on_complete(saved: Path) -> None:
            say(f"saved {self._folder / saved.name}")
            on_save(saved)

        publication = replace(TO_DISK, on_complete=on_complete, on_chunk=on_chunk)
        self._saver = RunSaver(
            self._folder, state, kept=kept, is_async=config.is_async, data=data, publication=publication
        )
        if config.snapshot_every:
            from gpt.checkpoint.snapshots import Snapshots

            self._snapshots: Snapshots | None = Snapshots(config, run_dir, state, data, on_chunk, self._report)
        else:
            self._snapshots = None
        if config.weights:
            from gpt.checkpoint.export import LiveExports

            self._weights: LiveExports | None = LiveExports(state, run_dir / WEIGHTS, kept, data, self._report)
        else:
            self._weights = None
        self._saved_step: int | None = None  # of the newest checkpoint in the folder, saved or loaded
        self._failure: SaveError | None = None  # the error of the last save

    @property
    def _folder(self) -> Path:
        return self._run_dir / CHECKPOINTS

    def resume(self, settings: str, samples_before: Callable[[int], int] = lambda step: 0) -> Progress:
        """Lock the folder, load the checkpoint that `checkpoint.resume` selects, and return its progress.

        `settings` is the text of config.yaml, and `samples_before` a function of a step, for checkpoints of other
        programs. Raises ConfigError if the folder is in use or cannot be written, or if the checkpoint cannot be
        loaded; the lock is then released.
        """
        try:
            return self._resume(settings, samples_before)
        except BaseException:
            self.release()
            raise

    def _resume(self, settings: str, samples_before: Callable[[int], int]) -> Progress:
        # Before anything is read, because another job may be writing to the folder. A folder that does not exist yet is
        # locked below: nothing is created if loading fails.
        if self._is_first and self._run_dir.exists():
            self._lock.take()
        progress, found = Progress(run=_new_name()), self._choose(find_to_train(self._folder, self._config.resume))
        progress, source = self._load(found, samples_before) or (progress, None)
        if source:
            resume = self._config.resume
            began = (
                ""
                if resume == "auto" or Path(resume) == found
                else f"; it has begun once as checkpoint.resume={resume} says"
            )
            self._say(f"resumed from {source}, after step {progress.step}{began}")
            if source.resolve() == (self._folder / checkpoint_name(progress.step)).resolve():
                self._saved_step = progress.step
        if self._snapshots:
            self._snapshots.delete_after(progress.step)
        if self._is_first:
            self._lock.take()
            start_run(self._run_dir, settings, progress.step, progress.run)
            for folder in (self._folder, self._run_dir / WEIGHTS):
                remove_partial(folder)
            begin_from(self._folder, self._config.resume, progress.step)  # also one that is damaged
        # Before any rank saves: the first one has removed what interrupted saves have left.
        self._state.mesh.barrier()
        return progress

    def _choose(self, own: Path | None) -> Path | None:
        """Return the newest checkpoint that a rank has found: a file server may show an old listing to some ranks.

        Raises ConfigError unless all ranks have it.
        """
        decisions = Decisions(self._state.mesh.rank, self._state.mesh.size)
        step, path = decisions.decide([(step_in_name(own) or 0) if own else -1, str(own)], max)
        if step < 0:
            return None
        chosen = Path(path)
        has_it = decisions.decide(comes_true(chosen.exists), list)
        if not all(has_it):
            raise ConfigError(
                f"rank {has_it.index(False)} does not have {chosen}, from which another rank would go on; put "
                f"run.dir={self._run_dir} on a file system that all nodes share"
            )
        return chosen

    def _load(self, found: Path | None, samples_before: Callable[[int], int]) -> tuple[Progress, Path] | None:
        """Load the newest snapshot if it is newer than the checkpoint `found`, else that, and return which."""
        if self._snapshots:
            after = step_in_name(found) if found else None
            is_continued = (self._run_dir / CONFIG).exists() and goes_on(self._folder, self._config.resume)
            name = read_name(self._run_dir) if is_continued else None
            if snapshot := self._snapshots.load_newest(after or 0, name):
                return snapshot
        if found is None:
            return None
        progress, found = self._load_whole(found, self._data, samples_before)
        return replace(progress, run=progress.run or _new_name()), found

    def _load_whole(self, found: Path, *of_load: Any) -> tuple[Progress, Path]:
        """Load a checkpoint, or with `checkpoint.fall_back` the newest before it that is not damaged, and return which.

        One that the user has named is never replaced.
        """
        while True:
            try:
                return load(found, self._state, *of_load), found
            except DamageError as error:
                step = step_in_name(found)
                if not self._config.fall_back or step is None or found == Path(self._config.resume):
                    raise
                before = self._choose(newest(self._folder, step))
                if before is None:
                    raise
                if self._is_first:
                    self._report(f"{error}; checkpoint.fall_back: {before} is taken")
                found = before

    def save(self, progress: Progress) -> None:
        """Wait for the previous save, and begin to save the checkpoint of this step.

        A save that fails is logged, and training goes on.
        """
        if self._saved_step == progress.step:
            return
        self._settle()
        self._saver.start(progress)
        self._saved_step = progress.step
        if not self._config.is_async:
            self._settle()
        if self._weights:
            self._weights.export(progress.step)

    def save_snapshot(self, progress: Progress) -> None:
        """Begin to save a snapshot of this step. One that fails is logged, and training goes on."""
        assert self._snapshots is not None
        self._snapshots.save(progress)

    def finish(self) -> None:
        """Wait for the last save. Raises SaveError if it failed, because the run would end without its last steps."""
        self._settle()
        if self._failure:
            raise self._failure
        if self._snapshots:
            self._snapshots.delete_all()

    def roll_back(self, progress: Progress) -> Progress:
        """Load the newest checkpoint, and return its step with the samples that `progress` has consumed.

        The samples since that checkpoint are thus left out. Raises ConfigError if there is no checkpoint.
        """
        self._settle()
        found = self._choose(newest(self._folder))
        if found is None:
            raise ConfigError(
                f"guard.policy=roll_back found no checkpoint with checkpoint.every={self._config.every}; save more "
                "often, such as every 100 steps"
            )
        before, found = self._load_whole(found)
        if self._is_first:
            cut_metrics(self._run_dir, before.step)
        self._saved_step = before.step
        if self._snapshots:
            self._snapshots.delete_after(before.step)
        self._say(f"rolled back from step {progress.step} to {found}; the samples in between are left out")
        return replace(progress, step=before.step)

    def release(self) -> None:
        """Release the lock on the folder."""
        self._lock.release()

    def _settle(self) -> None:
        """Wait for the save that has begun, and report how it ended."""
        try:
            if self._saver.wait():
                self._failure = None
        except SaveError as error:
            self._failure, self._saved_step = error, None
            if self._is_first:
                self._report(str(error))

    def _report(self, reason: str) -> None:
        """Log what could not be written; the first rank calls it."""
        logger.error("error: %s; training goes on", reason)
        self.on_failure(reason)


def _new_name() -> str:
    """Return a random name for a run that begins, the same on all ranks."""
    return shared_store().compare_set("run", "", secrets.token_hex(6)).decode()
