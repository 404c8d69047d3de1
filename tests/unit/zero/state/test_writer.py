"""The moment at which a save has read the tensors that training changes, and its words about a failure."""

import errno
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.mesh import Mesh
from tests.unit.zero.step.test_loss_scale import CopiesToHost
from zero.checkpoint import writer as module
from zero.checkpoint.layout_file import rank_file
from zero.checkpoint.tensor_file import TensorFile
from zero.checkpoint.writer import CheckpointWriter, HostCopies, Publication, SaveError

CPU = torch.device("cpu")


@dataclass
class Values:
    """A state of a few tensors in one process."""

    values: dict[str, torch.Tensor]
    mesh: Mesh = field(default_factory=lambda: Mesh.create(1))
    device: torch.device = CPU

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.values

    def describe(self, content: dict[str, Any]) -> dict[str, Any]:
        return content


def make_writer(values: torch.Tensor, is_async: bool, **others: Any) -> CheckpointWriter:
    return CheckpointWriter(Values({"a": values}), Publication("make room", **others), is_async=is_async)


def start(writer: CheckpointWriter, final: Path) -> None:
    writer.begin(final, {}, "save", "of step 7")


class LateThread(threading.Thread):
    """A thread that begins only when it is waited for."""

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        if self.ident is None:
            super().start()
        super().join(timeout)


@pytest.mark.parametrize("is_async", [False, True])
def test_training_may_change_what_is_saved_as_soon_as_a_save_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
):
    monkeypatch.setattr(module, "threading", SimpleNamespace(Thread=LateThread))
    values = torch.arange(5.0)
    writer = make_writer(values, is_async)
    for number in range(2):  # the second asynchronous save finds the copies of the first
        final = tmp_path / f"{number}"
        values.fill_(number)
        start(writer, final)
        assert final.exists() == (not is_async)
        values.fill_(-1)
        assert writer.wait() == final
        assert TensorFile(rank_file(final, 0)).tensor("a").equal(torch.full((5,), float(number)))
    assert writer.wait() is None


def test_a_failure_names_the_checkpoint_the_rank_the_reason_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_tensors", fail)
    completed: list[Path] = []
    writer = make_writer(torch.zeros(1), True, on_complete=completed.append)
    start(writer, tmp_path / "a")
    expected = rf"^checkpoint of step 7 cannot be written to {tmp_path}: rank 0: No space left on device; make room$"
    with pytest.raises(SaveError, match=expected):
        writer.wait()
    assert list(tmp_path.iterdir()) == [], "what was written so far is removed"
    monkeypatch.undo()
    start(writer, tmp_path / "a")
    assert writer.wait() == tmp_path / "a"
    assert completed == [tmp_path / "a"]


@pytest.mark.parametrize("change", [Path.unlink, lambda path: os.truncate(path, 5)], ids=["missing", "short"])
def test_files_that_the_first_rank_does_not_find_as_they_were_written_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
):
    """Save as if a rank had written to the disk of another node."""
    monkeypatch.setattr(module, "STALE_SECONDS", 0.0)
    writer = make_writer(torch.zeros(1), True, on_written=lambda partial, _: change(rank_file(partial, 0)))
    start(writer, tmp_path / "a")
    expected = rf"rank 0: does not find {tmp_path}/\.a\.\w+-1\.partial/rank-00000\.safetensors of \d+ bytes, .*; make"
    with pytest.raises(SaveError, match=expected):
        writer.wait()
    assert list(tmp_path.iterdir()) == []


def test_what_the_store_keeps_of_a_save_does_not_grow_with_the_ranks(tmp_path: Path):
    writer, final = make_writer(torch.zeros(1), True), tmp_path / "a"
    start(writer, final)
    assert writer.wait() == final
    mesh = Mesh.create(1)
    key = f"save/a/{mesh.first_rank}/1/1"
    assert writer.store.check([f"{key}/outcome"])
    assert not writer.store.check([f"{key}/reports"])


def test_old_checkpoints_that_cannot_be_deleted_do_not_fail_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    writer = make_writer(torch.zeros(1), True, tidy=fail)
    with caplog.at_level(logging.WARNING):
        start(writer, tmp_path / "a")
        assert writer.wait() == tmp_path / "a"
    assert caplog.messages == [f"old checkpoints in {tmp_path} cannot be deleted: Permission denied"]


def test_copies_in_host_memory_are_reused_while_shape_and_type_stay():
    copies = HostCopies(torch.device("cpu"))
    first = copies.take({"x": torch.ones(3)})["x"]
    assert copies.take({"x": torch.full((3,), 2.0)})["x"] is first
    assert first.tolist() == [2.0] * 3
    for other in (torch.ones(4), torch.ones(4, dtype=torch.float64)):
        copy = copies.take({"x": other})["x"]
        assert copy is not first
        assert (copy.shape, copy.dtype) == (other.shape, other.dtype)


def test_the_host_does_not_wait_for_the_copy_of_each_tensor():
    with CopiesToHost() as copies:
        HostCopies(CPU).take({name: torch.ones(3, device="meta") for name in "xy"})
    assert copies.go_on == [True, True]
