"""Saves checkpoints so that a crash cannot damage them: into another folder, flushed, then renamed.

    every rank    copy to host memory (asynchronous only) -> write its file in .step-*.partial -> report to the store
    first rank    all have reported -> layout.json -> rename -> latest -> delete old checkpoints -> outcome to the store

Ranks communicate through the launcher's store and not with collectives, which training uses at the same time. A save
that fails raises SaveError on all ranks, and leaves the checkpoints before it as they were.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.build import TrainState
from gpt.checkpoint.checkpoint import (
    LATEST,
    LAYOUT,
    Progress,
    checkpoint_name,
    complete_checkpoints,
    describe,
    owned_tensors,
)
from parallel.errors import ConfigError
from parallel.instruments.memory_tracker import TensorKind, allocating
from parallel.streams import announce_host_read, synchronize
from parallel.world import shared_store
from zero.state.saved_state import rank_file
from zero.state.sealed_file import flush_folder, replace_text, write_json
from zero.state.tensor_file import write_tensors

WAIT_SECONDS = 5.0  # after which a rank that waits in the store looks for signals


class SaveError(ConfigError):
    """An error raised if a checkpoint could not be written; training may go on."""


class Saver:
    """A writer of checkpoints of `state` to `folder`, in which the newest `keep` checkpoints remain.

    All ranks make the same calls. `on_chunk` is called in another thread whenever a few megabytes have been written.
    """

    def __init__(
        self, folder: Path, state: TrainState, *, keep: int, is_async: bool, on_chunk: Callable[[], None] = lambda: None
    ):
        self._folder, self._state, self._keep, self._on_chunk = folder, state, keep, on_chunk
        self._store = shared_store()
        self._host_copies = HostCopies(state.device) if is_async else None
        self._num_saves = 0
        self._pending: tuple[threading.Thread, Callable[[], Path]] | None = None

    def start(self, progress: Progress) -> None:
        """Begin to save. Call `wait` before the next save.

        If the saver is asynchronous, this returns when the state is copied, and training may change the state.
        Otherwise it returns when this rank's file is written.
        """
        assert self._pending is None, "the save before this one has not been waited for"
        self._num_saves += 1
        final = self._folder / checkpoint_name(progress.step)
        key = f"save/{final}/{self._num_saves}"
        partial = final.with_name(f".{final.name}.partial")
        tensors, layout = owned_tensors(self._state), describe(self._state, progress)
        if self._host_copies:
            tensors = self._host_copies.take(tensors)

        def write() -> None:
            self._write_rank(key, partial, tensors)
            if self._state.mesh.rank == 0:
                self._complete(key, partial, final, layout)

        announce_host_read(tensors.values())
        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        self._pending = thread, lambda: self._outcome(key, progress, final)
        if not self._host_copies:
            # Before training goes on: the thread reads the tensors themselves, which the next step changes.
            thread.join()

    def wait(self) -> Path | None:
        """Wait until the save that `start` began is complete, and return its folder, or None if there is none.

        Raises SaveError on all ranks if it failed on any.
        """
        if self._pending is None:
            return None
        thread, outcome = self._pending
        self._pending = None
        thread.join()
        return outcome()

    def _write_rank(self, key: str, partial: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write this rank's file, and report it or the error to the store under `key`."""
        try:
            partial.mkdir(parents=True, exist_ok=True)
            write_tensors(rank_file(partial, self._state.mesh.rank), tensors, on_chunk=self._on_chunk)
        except Exception as error:  # any error: the first rank waits until every rank has reported
            self._store.set(f"{key}/error", f"rank {self._state.mesh.rank}: {_reason(error)}")
        # After the error is set: the first rank looks for an error as soon as all ranks are counted.
        if self._store.add(f"{key}/num_written", 1) == self._state.mesh.size:
            self._store.set(f"{key}/all_written", "")

    def _complete(self, key: str, partial: Path, final: Path, layout: dict) -> None:
        """Wait for all ranks, give the checkpoint its final name, and report the outcome. The first rank calls it."""
        _wait_for(self._store, f"{key}/all_written")
        reason = ""
        if self._store.check([f"{key}/error"]):
            reason = self._store.get(f"{key}/error").decode()
        else:
            try:
                # In this order, a crash at any point leaves the older checkpoints usable: the folder gets its final
                # name when all of it is on disk, and `latest` changes only after that. Old ones are deleted last.
                write_json(partial / LAYOUT, layout)
                flush_folder(partial)
                partial.rename(final)
                replace_text(self._folder / LATEST, final.name)
            except Exception as error:
                reason = f"rank 0: {_reason(error)}"
        if reason:
            shutil.rmtree(partial, ignore_errors=True)  # make room for the next attempt
        else:
            keep_newest(complete_checkpoints(self._folder), self._keep)
        self._store.set(f"{key}/outcome", reason)

    def _outcome(self, key: str, progress: Progress, final: Path) -> Path:
        """Wait until the first rank has reported the outcome. Return the checkpoint, or raise SaveError."""
        _wait_for(self._store, f"{key}/outcome")
        if reason := self._store.get(f"{key}/outcome").decode():
            raise SaveError(
                f"checkpoint of step {progress.step} cannot be written to {final.parent}: {reason}; make room or "
                "choose another run.dir (the checkpoint before it is untouched)"
            )
        return final


class HostCopies:
    """Copies of tensors in host memory, which is pinned for tensors on a GPU, and reused at every save."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors, which are complete when this returns: the tensors may then change."""
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                with allocating(TensorKind.OTHER, on_host=True):
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[name] = copy
            copy.copy_(tensor.detach(), non_blocking=True)
        synchronize(self._device)
        return {name: self._copies[name] for name in tensors}


def _wait_for(store: dist.Store, key: str) -> None:
    """Wait until a key is set. The store wakes all ranks: if each asked again and again, it would be kept busy."""
    while True:
        try:
            store.wait([key], timedelta(seconds=WAIT_SECONDS))
            return
        except RuntimeError:
            if store.check([key]):  # raises if the store has ended
                return


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def keep_newest(folders: list[Path], keep: int) -> None:
    """Delete all but the last `keep` folders."""
    for old in folders[:-keep]:
        # Renamed first, so that a folder that is half deleted never looks like a complete checkpoint.
        doomed = old.rename(old.with_name(f".{old.name}.partial"))
        shutil.rmtree(doomed, ignore_errors=True)
