"""Saves in which ranks wait without keeping the store busy, and settings that all ranks compare."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gpt.builder.train_state import build
from gpt.checkpoint.checkpoint import TO_DISK
from gpt.checkpoint.checkpoint import RunSaver as Saver
from gpt.checkpoint.folder import Kept
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.recovery import Recovery
from gpt.settings.parser import parse_settings
from parallel.errors import ConfigError
from parallel.mesh import Mesh
from tests.ranks import run_ranks
from tests.unit.gpt.builder.test_train_state import BASE
from tests.unit.gpt.checkpoint.runs import DATA
from zero.state import writer


class RecordingStore:
    """A store that records its calls, and for how long it was to wait; it waits until the key is set."""

    def __init__(self, store: dist.Store):
        self._store, self.calls, self.seconds = store, [], []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._store, name)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.seconds.append(timeout.total_seconds())
        self._store.wait(keys, timedelta(hours=1))


def questions_of_a_save(folder: Path) -> tuple[list[str], list[float]]:
    """The calls of the store with which a rank saves, and the seconds for which it waits there before it asks again."""
    settings = parse_settings([f"--config={BASE}"])
    state = build(settings, Mesh.create(1), torch.device("cpu"))
    store = RecordingStore(writer.shared_store())
    with mock.patch.object(writer, "shared_store", return_value=store):
        own = Saver(folder, state, kept=Kept(1), is_async=True)
        own.start(Progress(1))
        assert own.wait() == folder / "step-00000001"
    return store.calls, store.seconds


def saves_that_are_reported_before_anyone_waits(folder: Path) -> list[Path]:
    """The checkpoints that a saver has reported to this rank; the first rank waits for the report of one."""
    state = build(parse_settings([f"--config={BASE}"]), Mesh.create(1), torch.device("cpu"))
    reported: Queue[Path] = Queue()
    own = Saver(folder, state, kept=Kept(1), is_async=True, publication=replace(TO_DISK, on_complete=reported.put))
    own.start(Progress(1))
    found = [reported.get()] if dist.get_rank() == 0 else []
    own.wait()
    return found + list(reported.queue)


def test_the_first_rank_reports_a_checkpoint_when_it_is_complete(tmp_path):
    found = run_ranks(2, saves_that_are_reported_before_anyone_waits, tmp_path)
    assert found == [[tmp_path / "step-00000001"], []]


def test_a_rank_asks_the_store_a_few_times_however_long_a_save_takes(tmp_path):
    for calls, seconds in run_ranks(2, questions_of_a_save, tmp_path):
        assert len(calls) <= 8
        assert "check" not in calls
        assert min(seconds) >= 5


def parts_at_each_barrier_of_a_resume(folder: Path) -> list[list[str]]:
    """The parts of checkpoints that are there when a rank that resumes begins to wait for all others."""
    settings = parse_settings([f"--config={BASE}", f"--run.dir={folder}"])
    state = build(settings, Mesh.create(1), torch.device("cpu"))
    own = Recovery(settings.checkpoint, folder, state, DATA, lambda _: None, lambda: None, lambda _: None)
    if dist.get_rank() == 0:
        (folder / "checkpoints" / ".step-00000007.partial").mkdir(parents=True)
    dist.barrier()
    found = []

    def barrier(_: Mesh) -> None:
        found.append([path.name for path in (folder / "checkpoints").iterdir()])
        dist.barrier()

    with mock.patch.object(Mesh, "barrier", barrier):
        own.resume("")
    own.release()
    return found


def test_no_rank_goes_on_before_the_first_has_tidied_the_folder(tmp_path):
    first, second = run_ranks(2, parts_at_each_barrier_of_a_resume, tmp_path)
    assert (first[-1], len(second)) == ([], len(first))


def resumed_from_folders_of_their_own(folder: Path) -> str:
    """The error of a rank whose folder has no checkpoint, or which is the only one whose folder has one."""
    settings = parse_settings([f"--config={BASE}", f"--run.dir={folder}", "--parallel.tensor_size=2"])
    state = build(settings, Mesh.create(2), torch.device("cpu"))
    run_dir = folder / str(dist.get_rank())
    (run_dir / "checkpoints" / ("step-00000001" if dist.get_rank() == 2 else "other")).mkdir(parents=True)
    own = Recovery(settings.checkpoint, run_dir, state, DATA, lambda _: None, lambda: None, lambda _: None)
    try:
        own.resume("")
    except ConfigError as error:
        return str(error)
    finally:
        own.release()
    return ""


def test_ranks_that_would_resume_from_different_checkpoints_are_refused_along_both_axes(tmp_path):
    found = run_ranks(4, resumed_from_folders_of_their_own, tmp_path)
    for rank, error in enumerate(found):
        own = tmp_path / "2/checkpoints/step-00000001" if rank == 2 else None
        assert f"rank {rank} would resume from {own}, another rank from elsewhere; put run.dir=" in error
