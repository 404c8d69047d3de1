"""Writes checkpoints so that a crash cannot damage them: into another folder, flushed, then renamed.

    every rank    copy to host memory (asynchronous only) -> write its file in .NAME.SAVE.partial
                  -> its seal to the store
    first rank    all have reported, and it finds all files -> layout.json -> publish: rename -> outcome to the store
                  -> tidy: delete old ones
    other hosts   the same in folders of their own, with the seals that the first rank has found

Ranks communicate through the launcher's store and not with collectives, which training uses at the same time. A save
that fails raises SaveError on all ranks, and leaves the checkpoints before it as they were.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind, allocating
from parallel.store import shared_store
from parallel.streams import announce_host_read, synchronize
from parallel.validation.errors import ConfigError
from parallel.validation.paths import remove
from zero.checkpoint.layout_file import LAYOUT, ORIGIN, origin, rank_file
from zero.checkpoint.rank_state import RankState
from zero.checkpoint.sealed_file import flush_folder, write_json
from zero.checkpoint.tensor_file import write_tensors

logger = logging.getLogger(__name__)

WAIT_SECONDS = 5.0  # after which a rank that waits in the store looks for signals
BEAT_SECONDS, LOST_SECONDS = 5.0, 30.0  # between signs of life; without one, a rank is lost
LOST = "Connection closed by peer: "  # as gloo says it
STALE_SECONDS = 90.0  # for which a client of a file server may not show what others have written
STALE_POLL_SECONDS = 0.5
MOST_REQUESTS = 16  # at a time to a file server, which takes a millisecond for each of thousands of files


class SaveError(ConfigError):
    """An error raised if a checkpoint could not be written; training may go on."""


@dataclass(frozen=True)
class Publication:
    """The part of a save that the program decides, and what it hears of one.

    When all ranks have written their files, the first rank calls `publish(partial, final)`, which gives the folder its
    final name; if it raises, the save has failed. When the other ranks know of the success, it calls
    `on_complete(final)`, and `tidy()`, which removes what is not needed any more; its errors are logged. If folders are
    not shared, each of `hosts`, one rank a folder and rank 0 among them, writes layout.json and publishes. `remedy` is
    what the user can do about a failure. Every rank calls `make_room()` before it writes its file, `on_chunk` whenever
    a few megabytes have been written, and `on_written(partial, is_written)` after its file or its failure to write it.
    All are called in the thread that writes.
    """

    remedy: str
    publish: Callable[[Path, Path], object] = Path.rename
    tidy: Callable[[], None] = lambda: None
    on_complete: Callable[[Path], None] = lambda final: None
    on_chunk: Callable[[], None] = lambda: None
    on_written: Callable[[Path, bool], None] = lambda partial, is_written: None
    hosts: Sequence[int] = (0,)
    make_room: Callable[[], None] = lambda: None


class CheckpointWriter:
    """A writer of the checkpoints of a state, one at a time. All ranks of its mesh make the same calls.

    A class that derives from it decides, in a method `start`, what it saves and where, and calls `begin`.
    """

    def __init__(self, state: RankState, publication: Publication, *, is_async: bool):
        self._state, self._publication = state, publication
        self._rank, self._num_ranks = state.mesh.rank, state.mesh.size
        self._mesh = f"{state.mesh.first_rank}/{state.mesh.size}"  # other meshes of the job may save at the same time
        self.store = shared_store()
        # A random name, by which this job knows its own folders: another job may save to the same one.
        self._job = self.store.compare_set(f"saves/{self._mesh}/job", "", secrets.token_hex(6)).decode()
        self._host_copies = HostCopies(state.device) if is_async else None
        self._pending: tuple[threading.Thread, Callable[[], Path]] | None = None

    def agree(self, final: Path, value: str) -> str:
        """Return the first rank's `value` on all ranks."""
        key = f"{self._new_key(final)}/value"
        if self._rank == 0:
            self.store.set(key, value)
        self._wait_for(key)
        return self.store.get(key).decode()

    def begin(self, final: Path, content: Mapping[str, Any], save: str, title: str) -> None:
        """Begin to save the state to the folder `final`. Call `wait` before the next save.

        If the writer is asynchronous, this returns when the tensors are copied, and training may change them. Otherwise
        it returns when this rank's file is written. `content` is that of `RankState.describe`, `save` names this save
        in the files, and `title` in errors.
        """
        assert self._pending is None, "the save before this one has not been waited for"
        key = self._new_key(final)
        partial = final.with_name(f".{final.name}.{self._job}-{key.rpartition('/')[2]}.partial")
        layout, tensors = self._state.describe(content), self._state.tensors()
        if self._host_copies:
            tensors = self._host_copies.take(tensors)

        def write() -> None:
            with suppress(RuntimeError):  # the store has ended, and with it this job: `wait` raises it too
                self._show_life(key)  # before the file is begun: who shows none is not known to write
                self._write_rank(key, partial, tensors, origin(self._rank, save))
                if self._rank in self._publication.hosts:
                    self._complete(key, partial, final, layout)

        announce_host_read(tensors.values())
        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        threading.Thread(target=self._beat, args=(key, thread), daemon=True).start()
        self._pending = thread, lambda: self._outcome(key, title, final)
        if not self._host_copies:
            # Before training goes on: the thread reads the tensors themselves, which the next step changes.
            thread.join()

    def wait(self) -> Path | None:
        """Wait until the save that was begun is complete, and return its folder, or None if there is none.

        Raises SaveError on all ranks if it failed on any, and RuntimeError if a rank was lost while it wrote its file.
        """
        if self._pending is None:
            return None
        thread, outcome = self._pending
        self._pending = None
        thread.join()
        return outcome()

    def _new_key(self, final: Path) -> str:
        """Return a key of the store for a save to `final`, which no other save has: all ranks return the same."""
        # Counted in the store and not here: a second writer of the same folder must not find the first one's keys.
        return f"save/{final.name}/{self._mesh}/{self.store.add(f'saves/{self._mesh}/{self._rank}', 1)}"

    def _beat(self, key: str, thread: threading.Thread) -> None:
        """Show the first rank that this process runs, until its file is written."""
        with suppress(RuntimeError):  # the store has ended
            thread.join(BEAT_SECONDS)
            while thread.is_alive():
                self._show_life(key)
                thread.join(BEAT_SECONDS)

    def _show_life(self, key: str) -> None:
        self.store.add(f"{key}/beats/{self._rank}", 1)

    def _end_if_lost(self, key: str, looks: list[tuple[float, dict[int, int]]]) -> None:
        """End the save if a rank that has begun to write, and has not reported, shows no life any more."""
        if self._rank > 0 or time.monotonic() - looks[-1][0] < LOST_SECONDS:
            return
        reported = {report["rank"] for report in self._reports(key)}
        beats = {n: self.store.add(f"{key}/beats/{n}", 0) for n in range(self._num_ranks) if n not in reported}
        if lost := [rank for rank, number in beats.items() if number and number == looks[-1][1].get(rank)]:
            self._report(key, {"rank": lost[0], "error": f"{LOST}rank {lost[0]} has ended while it wrote its file"})
            self.store.set(f"{key}/all_written", "")
        looks.append((time.monotonic(), beats))

    def _reports(self, key: str) -> list[dict[str, Any]]:
        """Return what ranks have reported, by rank, when this one has."""
        lines = self.store.get(f"{key}/reports").decode().splitlines()
        return sorted(map(json.loads, lines), key=lambda report: report["rank"])

    def _report(self, key: str, report: Mapping[str, Any]) -> None:
        self.store.append(f"{key}/reports", json.dumps(report) + "\n")  # type: ignore[attr-defined]

    def _wait_for(self, key: str, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until a key is set. The store wakes all ranks: if each asked again and again, it would be kept busy."""
        while True:
            try:
                self.store.wait([key], timedelta(seconds=WAIT_SECONDS))
                return
            except RuntimeError:
                if self.store.check([key]):  # raises if the store has ended
                    return
            on_wait()

    def _write_rank(self, key: str, partial: Path, tensors: Mapping[str, Tensor], file_origin: str) -> None:
        """Write this rank's file, and report its seal, or the error, to the store under `key`."""
        report: dict[str, Any] = {"rank": self._rank}
        try:
            try:
                self._publication.make_room()
                partial.mkdir(parents=True, exist_ok=True)
                path = rank_file(partial, self._rank)
                report["seal"] = write_tensors(path, tensors, {ORIGIN: file_origin}, self._publication.on_chunk)
            finally:
                self._publication.on_written(partial, "seal" in report)
        except Exception as error:  # any error: the first rank waits until every rank has reported
            report["error"] = f"rank {self._rank}: {_reason(error)}"
        self._report(key, report)
        # After the report: the first rank reads all reports as soon as all ranks are counted.
        if self.store.add(f"{key}/num_written", 1) == self._num_ranks:
            self.store.set(f"{key}/all_written", "")

    def _complete(self, key: str, partial: Path, final: Path, layout: Mapping[str, Any]) -> None:
        """Wait for all ranks, give the checkpoint its final name, and report the outcome. The hosts call it."""
        looks: list[tuple[float, dict[int, int]]] = [(time.monotonic(), {})]
        self._wait_for(f"{key}/all_written", lambda: self._end_if_lost(key, looks))
        reports = self._reports(key)
        errors = [report["error"] for report in reports if "error" in report]
        reason = next((error for error in errors if error.startswith(LOST)), errors[0] if errors else "")
        if not reason:
            try:
                # In this order, a crash at any point leaves the older checkpoints usable: the folder gets its final
                # name when all of it is on disk.
                if len(self._publication.hosts) == 1:
                    self._find_files(partial, reports)
                write_json(partial / LAYOUT, {**layout, "files": [report["seal"] for report in reports]})
                flush_folder(partial)
                self._publication.publish(partial, final)
            except Exception as error:
                gone = f"{partial} is gone: another job saves to this folder; choose one for each job"
                reason = f"rank {self._rank}: {_reason(error) if partial.exists() else gone}"
        if reason:
            remove(partial)  # make room for the next attempt
        self._report_outcome(key, reason)
        if reason:
            return
        if self._rank == 0:
            self._publication.on_complete(final)
        self._tidy(final.parent)  # last, because no rank waits for it

    def _report_outcome(self, key: str, reason: str) -> None:
        """Set the outcome when every host has published or failed."""
        if reason.startswith(LOST):  # a host may be lost, and none is waited for
            self.store.set(f"{key}/outcome", reason)
            return
        if (num_hosts := len(self._publication.hosts)) > 1:
            if reason:
                self.store.set(f"{key}/failure", reason)
            if self.store.add(f"{key}/num_published", 1) < num_hosts:
                return
            if self.store.check([f"{key}/failure"]):
                reason = self.store.get(f"{key}/failure").decode()
        self.store.delete_key(f"{key}/reports")  # as long as there are ranks, and the store never forgets
        self.store.set(f"{key}/outcome", reason)

    def _tidy(self, folder: Path) -> None:
        try:
            self._publication.tidy()
        except OSError as error:  # the ranks wait for the outcome of this save, which is good
            logger.warning("old checkpoints in %s cannot be deleted: %s", folder, _reason(error))

    def _outcome(self, key: str, title: str, final: Path) -> Path:
        """Wait until the first rank has reported the outcome. Return the checkpoint, or raise SaveError."""
        self._wait_for(f"{key}/outcome")
        reason = self.store.get(f"{key}/outcome").decode()
        if reason.startswith(LOST):
            raise RuntimeError(reason)
        if reason:
            raise SaveError(
                f"checkpoint {title} cannot be written to {final.parent}: {reason}; {self._publication.remedy}"
            )
        return final

    def _find_files(self, partial: Path, reports: Sequence[Mapping[str, Any]]) -> None:
        """Wait until this rank finds the file of every rank. Raises SaveError if others have disks of their own."""
        left = [(rank_file(partial, report["rank"]), report) for report in reports]

        def finds_all() -> bool:
            with ThreadPoolExecutor(MOST_REQUESTS) as pool:
                sizes = list(pool.map(_size, (path for path, _ in left)))
            left[:] = [
                (path, report) for (path, report), size in zip(left, sizes, strict=True) if size != report["seal"][1]
            ]
            if left and not partial.exists():
                raise FileNotFoundError
            return not left

        if not comes_true(finds_all, self._publication.on_chunk):
            path, report = left[0]
            raise SaveError(
                f"does not find {path} of {report['seal'][1]} bytes, which rank {report['rank']} has written; put the "
                "folder on a file system that all nodes share"
            )


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


def comes_true(is_true: Callable[[], bool], on_wait: Callable[[], None] = lambda: None) -> bool:
    """Return whether a condition on files becomes true while a client of a file server may show an old listing."""
    until = time.monotonic() + STALE_SECONDS
    while not is_true():
        if time.monotonic() >= until:
            return False
        on_wait()
        time.sleep(STALE_POLL_SECONDS)
    return True


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
