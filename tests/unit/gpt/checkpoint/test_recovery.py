"""The recovery of a run: what it says and leaves in the folder, and how a run goes on after a save that failed."""

import errno
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gpt.checkpoint import snapshots
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.recovery import Recovery
from gpt.run_folder.files import METRICS, NUMBERS_OF_A_STEP, append_records
from gpt.settings.run import CheckpointSettings
from lab.faults.damage import DAMAGES
from parallel.validation.errors import ConfigError
from tests.programs import wait_until
from tests.unit.gpt.checkpoint.runs import DATA, names_in, tiny_state, train_step
from zero.checkpoint import writer
from zero.checkpoint.writer import SaveError


@dataclass
class Run:
    """A run of one rank with its recovery, what that has said, and the checkpoints that it has reported."""

    folder: Path
    settings: dict[str, Any]
    said: list[str] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    text: str = "model: tiny\n"

    def __post_init__(self) -> None:
        self.state = tiny_state()
        config = CheckpointSettings(**{"every": 1} | self.settings)
        self.recovery = Recovery(
            config,
            self.folder,
            self.state,
            DATA,
            self.said.append,
            lambda: None,
            lambda path: self.completed.append(path.name),
        )
        self.name = self.recovery.resume(self.text).run

    def save(self, step: int) -> None:
        self.recovery.save(Progress(step, 2 * step, self.name))

    def train(self, step: int) -> list[Tensor]:
        """Take a step, and return the weights."""
        train_step(self.state, step)
        return [param.detach().clone() for param in self.state.model.module.parameters()]


def test_a_run_rolls_back_to_its_newest_checkpoint_and_saves_it_only_once(tmp_path: Path):
    run = Run(tmp_path / "run", {})
    with pytest.raises(ConfigError, match=r"roll_back found no checkpoint with checkpoint\.every=1; save more often"):
        run.recovery.roll_back(Progress(1, 2, run.name))
    run.train(1)
    run.save(1)
    expected = run.train(2)
    run.save(2)
    run.save(2)
    append_records(run.folder, [dict.fromkeys(NUMBERS_OF_A_STEP, 1) | {"step": step} for step in range(1, 6)])
    run.train(3)
    before = run.recovery.roll_back(Progress(5, 10, run.name))  # which waits for the save
    assert before == Progress(2, 10, run.name)
    assert all(a.equal(b) for a, b in zip(run.state.model.module.parameters(), expected, strict=True))
    assert [json.loads(line)["step"] for line in (run.folder / METRICS).read_text().splitlines()] == [1, 2]
    run.recovery.save(before)
    run.save(2)
    run.recovery.finish()
    run.recovery.release()
    checkpoints = run.folder / "checkpoints"
    assert run.completed == ["step-00000001", "step-00000002"]
    assert run.said == [
        *(f"saved {checkpoints / name}" for name in run.completed),
        f"rolled back from step 5 to {checkpoints / 'step-00000002'}; the samples in between are left out",
    ]
    again = Run(run.folder, {})
    again.recovery.save(again.recovery.roll_back(Progress(3, 6, run.name)))
    again.recovery.finish()
    again.recovery.release()
    assert again.completed == []


@pytest.mark.parametrize(
    ("damages", "step"), [({}, 3), ({3: "cut off"}, 2), ({3: "flipped", 2: "deleted"}, 1)], ids=str
)
def test_a_run_resumes_from_the_newest_state_that_is_whole(tmp_path: Path, damages: dict[int, str], step: int):
    settings = {"snapshot_every": 1, "snapshot_dir": str(tmp_path / "memory")}
    run = Run(tmp_path / "run", settings)
    run.train(1)
    run.save(1)
    run.recovery.roll_back(Progress(1, 2, run.name))  # which waits for the save
    for later in (2, 3):
        run.train(later)
        run.recovery.save_snapshot(Progress(later, 2 * later, run.name))
    expected = run.train(4)
    run.recovery.release()
    memory = CheckpointSettings(**settings).snapshot_folder(run.folder)
    wait_until((memory / "step-00000003").exists)  # it is written in another thread
    for saved, how in damages.items():
        DAMAGES[how](memory / f"step-{saved:08d}" / "rank-00000.safetensors")
    again = Run(run.folder, settings)
    source = memory if step > 1 else run.folder / "checkpoints"
    assert again.said == [f"resumed from {source / f'step-{step:08d}'}, after step {step}"]
    assert again.name == run.name
    *_, weights = (again.train(later) for later in range(step + 1, 5))
    assert all(a.equal(b) for a, b in zip(weights, expected, strict=True))
    again.recovery.finish()
    assert not memory.exists()
    again.recovery.release()
    other = Run(run.folder, settings | {"resume": "never"})
    assert other.said == []
    other.recovery.release()


def test_snapshots_are_those_of_the_user_and_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch):
    settings = {"snapshot_every": 1, "snapshot_dir": str(tmp_path / "memory"), "every": 0}
    run = Run(tmp_path / "run", settings)
    memory = CheckpointSettings(**settings).snapshot_folder(run.folder)
    assert memory.stat().st_mode & 0o777 == 0o700
    run.recovery.save_snapshot(Progress(1, 2, "another run"))
    wait_until((memory / "step-00000001").exists)
    run.recovery.release()
    again = Run(run.folder, settings)
    assert again.said == []
    assert caplog.messages == ["the snapshot of step 1 is not used: it is of another run"]
    again.recovery.release()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=rf"snapshot_dir: {tmp_path}/memory is a link, or of another user"):
        Run(run.folder, settings)
    monkeypatch.undo()
    memory.rename(tmp_path / "elsewhere")
    memory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"snapshot_dir: {memory} is a link"):
        Run(run.folder, settings)


def test_no_step_waits_until_an_older_snapshot_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(tmp_path / "run", {"snapshot_every": 1, "snapshot_dir": str(tmp_path / "memory")})
    has_returned, waited = threading.Event(), []
    monkeypatch.setattr(snapshots, "delete_old", lambda *_: waited.append(has_returned.wait(60)))
    run.recovery.save_snapshot(Progress(1, 2, run.name))
    has_returned.set()
    run.recovery.finish()
    run.recovery.release()
    assert waited == [True]


def test_a_run_resumes_from_a_tidy_folder(tmp_path: Path):
    folder = tmp_path / "run"
    first = Run(folder, {"asynchronous": False})
    first.train(1)
    first.save(4)
    assert first.completed == ["step-00000004"]  # at once
    first.recovery.release()
    for name in ("checkpoints/.step-00000005.partial", "weights/.step-00000004.partial"):
        (folder / name).mkdir(parents=True)
    again = Run(folder, {"asynchronous": False})
    assert again.name == first.name
    assert again.said == [f"resumed from {folder / 'checkpoints/step-00000004'}, after step 4"]
    assert (folder / "config.yaml").read_text() == "model: tiny\n"
    assert names_in(folder / "checkpoints") == ["latest", "step-00000004"]
    assert names_in(folder / "weights") == []
    again.recovery.release()
    other = Run(folder, {"resume": "never"})
    assert other.said == []
    assert other.name != first.name
    assert names_in(folder / "checkpoints") == ["latest", "old-1-step-00000004"]
    other.recovery.release()


def test_a_run_saves_the_step_from_which_it_resumes_unless_its_own_folder_has_it(tmp_path: Path):
    folder, memory = tmp_path / "run", {"snapshot_every": 1, "snapshot_dir": str(tmp_path / "memory")}
    first = Run(folder, memory)
    first.save(1)
    first.recovery.finish()
    first.recovery.save_snapshot(Progress(2, 4, first.name))
    wait_until(lambda: any((tmp_path / "memory").glob("*/step-00000002")))  # it is written in another thread
    first.recovery.release()
    named = str(folder / "checkpoints/../checkpoints/step-00000001")
    for where, settings, step, completed in (
        ("run", {}, 1, []),
        ("run", {"resume": named}, 1, []),
        ("other", {"resume": named}, 1, ["step-00000001"]),
        ("run", memory, 2, ["step-00000002"]),
    ):
        again = Run(tmp_path / where, settings)
        again.save(step)
        again.recovery.finish()
        again.recovery.release()
        assert again.completed == completed
    assert names_in(folder / "checkpoints") == ["latest", "step-00000001", "step-00000002"]


@pytest.mark.parametrize(("resume", "variable"), [("folder", ""), ("never", "TORCHELASTIC_RESTART_COUNT")])
def test_a_run_begins_once_where_it_is_told_to_and_its_restarts_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, variable: str
):
    origin, folder, is_branch = tmp_path / "run/checkpoints/step-00000002", tmp_path / "other", resume == "folder"

    def trained(run: Run, *steps: int) -> list[str]:
        for step in steps:
            run.save(step)
        run.recovery.finish()
        run.recovery.release()
        return run.said

    trained(Run(tmp_path / "run", {}), 2)
    trained(Run(folder, {}), 1, 9)  # of a run that was there before
    settings = {"resume": str(origin) if is_branch else resume, "keep": 9}
    said = trained(Run(folder, settings), 3, 4)
    assert said[:-2] == [f"resumed from {origin}, after step 2"] * is_branch
    if variable:
        monkeypatch.setenv(variable, "1")
    said = trained(Run(folder, settings), 5, 6)
    assert said[0].startswith(
        f"resumed from {folder / 'checkpoints/step-00000004'}, after step 4; it has begun once as "
    )
    steps = [f"step-{step:08d}" for step in range(3, 7)]
    aside = ["old-1-step-00000001", "old-1-step-00000009"]
    assert names_in(folder / "checkpoints") == ["began_from"] * is_branch + ["latest", *aside, *steps]


def test_a_folder_is_locked_for_one_run_and_not_made_for_one_that_cannot_begin(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        Run(tmp_path / "run", {"resume": "/nowhere"})
    assert names_in(tmp_path) == []
    for _ in range(2):  # a folder that is new, and one that exists
        run = Run(tmp_path / "run", {})
        with pytest.raises(ConfigError, match=r"run\.dir=.*run"):
            Run(tmp_path / "run", {})
        run.recovery.release()
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
    run = Run(tmp_path / "run", {"resume": "never"})
    with pytest.raises(ConfigError, match=r"run\.dir=.*run"):  # before its checkpoints are looked at
        Run(tmp_path / "run", {"resume": "/nowhere"})
    run.recovery.release()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_goes_on_after_a_save_that_failed_and_ends_with_its_error_if_it_was_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asynchronous: bool
):
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run, told = Run(tmp_path / "run", {"asynchronous": asynchronous}), list[str]()
    run.recovery.on_failure = told.append
    monkeypatch.setattr(writer, "write_tensors", fail)
    for number in range(2):  # what has failed is tried again
        run.save(1)
        assert len(caplog.messages) == number + (not asynchronous)
        with pytest.raises(SaveError, match=r"checkpoint of step 1 cannot be written .*No space left on device"):
            run.recovery.finish()
    assert [message.split("; ")[-1] for message in caplog.messages] == ["training goes on"] * 2
    assert caplog.messages == [f"error: {reason}; training goes on" for reason in told]
    monkeypatch.undo()
    run.save(1)
    run.recovery.finish()
    assert run.completed == ["step-00000001"]
    run.recovery.release()


def test_weights_are_exported_with_each_checkpoint_and_a_run_goes_on_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = Run(tmp_path / "run", {"weights": True, "keep": 2})
    (warning,), told = caplog.messages, list[str]()
    assert "has no tokenizer" in warning
    for step in (1, 2, 3, 3):
        run.save(step)
    run.recovery.finish()
    assert names_in(run.folder / "weights") == ["step-00000002", "step-00000003"]
    assert "config.json" in names_in(run.folder / "weights/step-00000003")
    (run.folder / "weights").rename(run.folder / "moved")
    (run.folder / "weights").touch()
    run.recovery.on_failure = told.append
    run.save(4)
    run.recovery.finish()
    assert f"weights cannot be written to {run.folder / 'weights'}: Not a directory; training goes on" in caplog.text
    assert len(told) == 1
    assert run.completed[-1] == "step-00000004"
    run.recovery.release()
