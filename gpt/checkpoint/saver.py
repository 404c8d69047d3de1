"""Saves checkpoints so that a crash cannot damage them: into another folder, flushed, then renamed.

    every rank    copy to host memory (asynchronous only) -> write its file in .step-*.partial -> its seal to the store
    first rank    all have reported -> layout.json -> rename -> latest -> delete old checkpoints -> outcome to the store

Ranks communicate through the launcher's store and not with collectives, which training uses at the same time. A save
that fails raises SaveError on all ranks, and leaves the checkpoints before it as they were.
"""

import json
import logging
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.build import TrainState
from gpt.checkpoint.checkpoint import owned_tensors
from gpt.checkpoint.folder import LATEST, LAYOUT, checkpoint_name, delete_old, set_aside
from gpt.checkpoint.layout import ORIGIN, Progress, describe, origin, with_seals
from parallel.errors import ConfigError
from parallel.instruments.memory_tracker import TensorKind, allocating
from parallel.streams import announce_host_read, synchronize
from parallel.world import shared_store
from zero.state.saved_state import rank_file
from zero.state.sealed_file import Seal, flush_folder, replace_text, write_json
from zero.state.tensor_file import write_tensors

logger = logging.getLogger(__name__)

WAIT_SECONDS = 5.0  # after which a rank that waits in the store looks for signals


class SaveError(ConfigError):
    """An error raised if a checkpoint could not be written; training may go on."""


class Saver:
    """A writer of checkpoints of `state` to `folder`, in which the newest `keep` checkpoints remain.

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
        self._folder, self._state, self._keep, self._on_chunk = folder, state, keep, on_chunk
        self._on_complete = on_complete
        self._data = data or {}
        self._store = shared_store()
        self._host_copies = HostCopies(state.device) if is_async else None
        self._num_saves = 0
        self._pending: tuple[threading.Thread, Callable[[], Path]] | None = None

    def name_run(self) -> str:
        """Return a random name for a run that begins, the same on all ranks."""
        return self._store.compare_set("run", "", secrets.token_hex(6)).decode()

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
        tensors, layout = owned_tensors(self._state), describe(self._state, progress, self._data)
        file_origin = origin(progress, self._state.mesh.rank)
        if self._host_copies:
            tensors = self._host_copies.take(tensors)

        def write() -> None:
            self._write_rank(key, partial, tensors, file_origin)
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

    def _write_rank(self, key: str, partial: Path, tensors: Mapping[str, Tensor], file_origin: str) -> None:
        """Write this rank's file, and report its seal, or the error, to the store under `key`."""
        rank = self._state.mesh.rank
        report: dict[str, Any] = {"rank": rank}
        try:
            partial.mkdir(parents=True, exist_ok=True)
            seal = write_tensors(rank_file(partial, rank), tensors, {ORIGIN: file_origin}, on_chunk=self._on_chunk)
            report["seal"] = asdict(seal)
        except Exception as error:  # any error: the first rank waits until every rank has reported
            report["error"] = f"rank {rank}: {_reason(error)}"
        self._store.append(f"{key}/reports", json.dumps(report) + "\n")  # type: ignore[attr-defined]
        # After the report: the first rank reads all reports as soon as all ranks are counted.
        if self._store.add(f"{key}/num_written", 1) == self._state.mesh.size:
            self._store.set(f"{key}/all_written", "")

    def _complete(self, key: str, partial: Path, final: Path, layout: dict[str, Any]) -> None:
        """Wait for all ranks, give the checkpoint its final name, and report the outcome. The first rank calls it."""
        _wait_for(self._store, f"{key}/all_written")
        lines = self._store.get(f"{key}/reports").decode().splitlines()
        self._store.delete_key(f"{key}/reports")  # as long as there are ranks, and the store never forgets
        reports = sorted(map(json.loads, lines), key=lambda report: report["rank"])
        reason = next((report["error"] for report in reports if "error" in report), "")
        if not reason:
            try:
                # In this order, a crash at any point leaves the older checkpoints usable: the folder gets its final
                # name when all of it is on disk, and `latest` changes only after that. Old ones are deleted last.
                write_json(partial / LAYOUT, with_seals(layout, [Seal(**report["seal"]) for report in reports]))
                flush_folder(partial)
                if final.exists():  # the run has not written it: it set aside all checkpoints of steps to come
                    set_aside(self._folder, [final])
                partial.rename(final)
                replace_text(self._folder / LATEST, final.name)
            except Exception as error:
                reason = f"rank 0: {_reason(error)}"
        if reason:
            shutil.rmtree(partial, ignore_errors=True)  # make room for the next attempt
        else:
            self._delete_old()
        self._store.set(f"{key}/outcome", reason)
        if not reason:
            self._on_complete(final)

    def _delete_old(self) -> None:
        try:
            delete_old(self._folder, self._keep)
        except OSError as error:  # the ranks wait for the outcome of this save, which is good
            logger.warning("old checkpoints in %s cannot be deleted: %s", self._folder, _reason(error))

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
