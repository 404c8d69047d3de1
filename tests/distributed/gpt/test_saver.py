"""Saves in which ranks wait without keeping the store busy, and settings that all ranks compare."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gpt.builder.train_state import build, build_mesh
from gpt.checkpoint import checkpoint
from gpt.checkpoint.checkpoint import TO_DISK
from gpt.checkpoint.checkpoint import RunSaver as Saver
from gpt.checkpoint.folder import Kept
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.recovery import Recovery
from gpt.monitor.node_map import find_nodes
from gpt.monitor.watch import Watch
from gpt.settings.parser import parse_settings
from lab.faults.damage import flip_bit
from parallel.mesh import Mesh
from parallel.store import shared_store
from parallel.validation.errors import ConfigError
from parallel.world import World
from tests.ranks import run_ranks
from tests.unit.gpt.builder.test_train_state import BASE
from tests.unit.gpt.checkpoint.runs import DATA
from zero.checkpoint import writer
from zero.checkpoint.sealed_file import DamageError

CPU = torch.device("cpu")


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
        store.calls.clear()
        own.start(Progress(1))
        assert own.wait() == folder / "step-00000001"
    return store.calls, store.seconds


def wait_for_the_other(store: dist.Store, *_: object) -> None:
    store.wait(["heard"], timedelta(seconds=60))


def saves_that_are_reported_before_anyone_waits(folder: Path) -> list[Path]:
    """The checkpoints that a saver has reported to this rank; the first rank waits for the report of one.

    It deletes old ones when the other rank has heard of the new one.
    """
    state = build(parse_settings([f"--config={BASE}"]), Mesh.create(1), torch.device("cpu"))
    reported: Queue[Path] = Queue()
    publication, store = replace(TO_DISK, on_complete=reported.put), shared_store()
    with mock.patch.object(checkpoint, "delete_old", partial(wait_for_the_other, store)):
        own = Saver(folder, state, kept=Kept(1), is_async=True, publication=publication)
    own.start(Progress(1))
    found = [reported.get()] if dist.get_rank() == 0 else []
    own.wait()
    store.set("heard", "")
    return found + list(reported.queue)


def test_the_first_rank_reports_a_checkpoint_when_it_is_complete_and_then_deletes_old_ones(tmp_path):
    found = run_ranks(2, saves_that_are_reported_before_anyone_waits, tmp_path)
    assert found == [[tmp_path / "step-00000001"], []]


def test_a_rank_asks_the_store_a_few_times_however_long_a_save_takes(tmp_path):
    for calls, seconds in run_ranks(2, questions_of_a_save, tmp_path):
        assert len(calls) <= 9
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
    """The error of a rank whose disk has no checkpoint, or which is the only one whose disk has one."""
    settings = parse_settings([f"--config={BASE}", "--run.dir=run", "--parallel.tensor_size=2"])
    state = build(settings, Mesh.create(2), torch.device("cpu"))
    disk, run_dir = folder / str(dist.get_rank()), Path("run")
    (disk / run_dir / "checkpoints" / ("step-00000001" if dist.get_rank() == 2 else "other")).mkdir(parents=True)
    with contextlib.chdir(disk), mock.patch.object(writer, "STALE_SECONDS", 0.0):  # ranks find other things at one path
        own = Recovery(settings.checkpoint, run_dir, state, DATA, lambda _: None, lambda: None, lambda _: None)
        with pytest.raises(ConfigError) as raised:
            own.resume("")
        own.release()
    return str(raised.value)


def test_a_checkpoint_that_some_rank_of_the_mesh_does_not_have_is_refused_on_all(tmp_path):
    found = run_ranks(4, resumed_from_folders_of_their_own, tmp_path)
    reason = "rank 0 does not have run/checkpoints/step-00000001, from which another rank would go on"
    assert found == [f"{reason}; put run.dir=run on a file system that all nodes share"] * 4


def connections_to_the_store(folder: Path) -> list[int]:
    """The number of this process's connections to the store before a run starts, and after it has saved."""
    settings = parse_settings(
        [
            f"--config={BASE}",
            f"--run.dir={folder}",
            "--checkpoint.snapshot_every=1",
            f"--checkpoint.snapshot_dir={folder}",
        ]
    )
    found, world = [num_connections(int(os.environ["MASTER_PORT"]))], World(dist.get_rank(), 2, 0, 1, CPU)
    mesh = build_mesh(settings, world)
    watch = Watch(settings, world, mesh.log)
    with watch.running():
        state = build(settings, mesh, CPU)
        own = Recovery(settings.checkpoint, folder, state, DATA, lambda _: None, lambda: None, lambda _: None)
        assert find_nodes(world)
        name = own.resume("").run
        own.save_snapshot(Progress(1, 1, name))
        own.save(Progress(1, 1, name))
        own.finish()
        found.append(num_connections(int(os.environ["MASTER_PORT"])))
    own.release()
    return found


def num_connections(port: int) -> int:
    """The number of connections of this process to a port."""
    links = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/self/net", name).read_text().splitlines()]
    return sum(row[2].endswith(f":{port:04X}") and row[9] in own for row in rows[1:])


def test_a_rank_has_three_connections_to_the_store(tmp_path):
    assert run_ranks(2, connections_to_the_store, tmp_path) == [[1, 3], [1, 3]]


def steps_with_a_listing_that_is_old_on_a_rank(folder: Path, old_on: int, fails_to_read: bool) -> list[int]:
    """The steps of the checkpoints to which a run rolls back, and from which it resumes; then with damage.

    If it `fails_to_read`, that rank alone cannot read the newest one.
    """
    settings = parse_settings([f"--config={BASE}", f"--run.dir={folder}", "--checkpoint.fall_back=true"])
    state = build(settings, Mesh.create(1), torch.device("cpu"))
    listed, exists, is_old = Path.glob, Path.exists, [dist.get_rank() == old_on]

    def list_without_the_newest(path: Path, pattern: str) -> Iterator[Path]:
        return (found for found in listed(path, pattern) if not is_old[0] or found.name != "step-00000002")

    def exists_later(path: Path) -> bool:
        """Return False once for the newest checkpoint."""
        hides, is_old[0] = is_old[0] and path.name == "step-00000002", is_old[0] and path.name != "step-00000002"
        return not hides and exists(path)

    def recovery() -> Recovery:
        return Recovery(settings.checkpoint, folder, state, DATA, lambda _: None, lambda: None, lambda _: None)

    own = recovery()
    name = own.resume("").run
    for step in (1, 2):
        own.save(Progress(step, step, name))
    with mock.patch.object(Path, "glob", list_without_the_newest), mock.patch.object(Path, "exists", exists_later):
        rolled_back = own.roll_back(Progress(3, 3, name))
        own.release()
        dist.barrier()
        again = recovery()
        resumed = again.resume("")
        again.release()
    read = checkpoint.read_run

    def read_with_an_error(path: Path) -> checkpoint.SavedRun:
        if path.name == "step-00000002" and dist.get_rank() == old_on:
            raise DamageError(f"{path} cannot be read: Input/output error")
        return read(path)

    if dist.get_rank() == 0 and not fails_to_read:
        flip_bit(folder / "checkpoints/step-00000002/rank-00001.safetensors")
    dist.barrier()
    with mock.patch.object(checkpoint, "read_run", read_with_an_error if fails_to_read else read):
        fallen_back = recovery()
        step = fallen_back.resume("").step
    fallen_back.release()
    return [rolled_back.step, resumed.step, step, len(list((folder / "checkpoints").glob("old-1-*")))]


@pytest.mark.parametrize(("old_on", "fails_to_read"), [(0, False), (1, True)])
def test_all_ranks_go_on_from_the_newest_whole_checkpoint_if_one_has_an_old_listing_or_finds_damage(
    tmp_path, old_on, fails_to_read
):
    found = run_ranks(2, steps_with_a_listing_that_is_old_on_a_rank, tmp_path / "run", old_on, fails_to_read)
    assert found == [[2, 2, 1, 1]] * 2
