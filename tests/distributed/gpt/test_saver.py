"""Saves in which ranks wait without keeping the store busy, and settings that all ranks compare."""

import time
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gpt.build.train_state import build
from gpt.checkpoint import recovery
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.recovery import Recovery, _all_ranks_have, remove_partial
from gpt.checkpoint.saver import RunSaver as Saver
from gpt.settings.parser import parse_settings
from parallel.errors import ConfigError
from parallel.mesh import Mesh
from tests.ranks import run_ranks
from tests.unit.gpt.build.test_train_state import BASE
from tests.unit.gpt.checkpoint.runs import DATA
from zero.state import writer
from zero.state.sealed_file import Seal


class CountingStore:
    """A store that counts its calls."""

    def __init__(self, store: dist.Store):
        self._store, self.num_calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(self._store, name)


def calls_in_a_slow_save(folder: Path) -> int:
    """The number of times that a rank asks the store while the last rank takes half a second to write its file."""
    settings = parse_settings([f"--config={BASE}"])
    state = build(settings, Mesh.create(1), torch.device("cpu"))
    store = CountingStore(writer.shared_store())
    write_tensors = writer.write_tensors

    def write_slowly(*args: Any, **kwargs: Any) -> Seal:
        time.sleep(0.5 * dist.get_rank())
        return write_tensors(*args, **kwargs)

    with mock.patch.multiple(writer, shared_store=lambda: store, write_tensors=write_slowly):
        own = Saver(folder, state, keep=1, is_async=True)
        own.start(Progress(1))
        assert own.wait() == folder / "step-00000001"
    return store.num_calls


def saves_that_are_reported_before_anyone_waits(folder: Path) -> list[Path]:
    """The checkpoints that a saver has reported to this rank half a minute after their start at the latest."""
    state = build(parse_settings([f"--config={BASE}"]), Mesh.create(1), torch.device("cpu"))
    reported: Queue[Path] = Queue()
    own = Saver(folder, state, keep=1, is_async=True, on_complete=reported.put)
    own.start(Progress(1))
    found = [reported.get(timeout=30)] if dist.get_rank() == 0 else []
    own.wait()
    return found + list(reported.queue)


def test_the_first_rank_reports_a_checkpoint_when_it_is_complete(tmp_path):
    found = run_ranks(2, saves_that_are_reported_before_anyone_waits, tmp_path)
    assert found == [[tmp_path / "step-00000001"], []]


def test_a_rank_asks_the_store_a_few_times_however_long_a_save_takes(tmp_path):
    assert max(run_ranks(2, calls_in_a_slow_save, tmp_path)) <= 10


def comparisons_of_settings() -> list[bool]:
    mesh = Mesh.create(tensor_size=2)
    odd = "other" if dist.get_rank() == 2 else "equal"
    return [_all_ranks_have(mesh, text) for text in ("equal", odd, "equal")]


def parts_that_a_resumed_rank_finds(folder: Path) -> list[str]:
    """The parts of checkpoints that are there when a rank has resumed; the first one takes its time to remove them."""
    settings = parse_settings([f"--config={BASE}", f"--run.dir={folder}"])
    state = build(settings, Mesh.create(1), torch.device("cpu"))
    own = Recovery(settings.checkpoint, folder, state, DATA, lambda _: None, lambda: None, lambda _: None)
    if dist.get_rank() == 0:
        (folder / "checkpoints" / ".step-00000007.partial").mkdir(parents=True)
    dist.barrier()

    def remove_slowly(of: Path) -> None:
        time.sleep(0.3)
        remove_partial(of)

    with mock.patch.object(recovery, "remove_partial", remove_slowly):
        own.resume("")
    found = [path.name for path in (folder / "checkpoints").iterdir()]
    dist.barrier()
    own.release()
    return found


def test_no_rank_goes_on_before_the_first_has_tidied_the_folder(tmp_path):
    assert run_ranks(2, parts_that_a_resumed_rank_finds, tmp_path) == [[], []]


def resumed_from_folders_of_their_own(folder: Path) -> str:
    """The error of a rank whose folder has a checkpoint, or which has a folder without one."""
    settings = parse_settings([f"--config={BASE}", f"--run.dir={folder}"])
    state = build(settings, Mesh.create(1), torch.device("cpu"))
    run_dir = folder / str(dist.get_rank())
    (run_dir / "checkpoints" / ("step-00000001" if dist.get_rank() else "other")).mkdir(parents=True)
    own = Recovery(settings.checkpoint, run_dir, state, DATA, lambda _: None, lambda: None, lambda _: None)
    try:
        own.resume("")
    except ConfigError as error:
        return str(error)
    finally:
        own.release()
    return ""


def test_ranks_that_would_resume_from_different_checkpoints_are_refused(tmp_path):
    found = run_ranks(2, resumed_from_folders_of_their_own, tmp_path)
    for rank, (error, own) in enumerate(zip(found, ["None", tmp_path / "1/checkpoints/step-00000001"], strict=True)):
        assert f"rank {rank} would resume from {own}, another rank from elsewhere; put run.dir=" in error


def test_settings_are_compared_over_both_axes():
    assert run_ranks(4, comparisons_of_settings) == [[True, False, True]] * 4
