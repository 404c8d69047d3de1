"""The folder of checkpoints: which is the newest, and what is kept."""

from pathlib import Path
from typing import Any

import pytest

from gpt.checkpoint.checkpoint import RunSaver as Saver
from gpt.checkpoint.checkpoint import load
from gpt.checkpoint.folder import LATEST, Kept, delete_old, find, set_aside_later
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.recovery import Recovery
from gpt.settings.run import CheckpointSettings
from parallel.validation.errors import ConfigError
from tests.unit.gpt.checkpoint.runs import DATA, names_in, tiny_state, train_step
from zero.checkpoint.layout_file import LAYOUT


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / LAYOUT).touch()


def test_only_folders_with_the_name_of_a_step_are_checkpoints(tmp_path: Path):
    make(tmp_path, "step-00000003", "step-00000006-backup", "step-7", "step-000000x9", "old-1-step-00000008", "step-")
    assert find(tmp_path, "auto") == tmp_path / "step-00000003"
    set_aside_later(tmp_path, 1)
    assert find(tmp_path, "auto") is None
    assert "step-00000006-backup" in names_in(tmp_path)
    delete_old(tmp_path, Kept(1))
    assert names_in(tmp_path) == ["old-2-step-00000003", "step-", "step-00000006-backup", "step-000000x9", "step-7"]


def test_steps_are_compared_as_numbers(tmp_path: Path):
    make(tmp_path, "step-99999999", "step-100000000")
    assert find(tmp_path, "auto") == tmp_path / "step-100000000"


@pytest.mark.parametrize(
    "text", [b"/etc", b"../other", b"step-00000003", b"step-00000009", b"\xff\xfe\x00", b"x" * 5000, b"", b"a\nb\n"]
)
def test_latest_that_names_something_else_is_a_warning_of_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes
):
    make(tmp_path, "step-00000003", "step-00000006")
    (tmp_path / LATEST).write_bytes(text)
    assert find(tmp_path, "auto") == tmp_path / "step-00000006"
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / LATEST} names ")
    assert message.endswith(f"but the newest checkpoint is {tmp_path / 'step-00000006'}")
    assert "\n" not in message
    assert len(message) < len(str(tmp_path)) * 2 + 200


def test_latest_that_names_the_newest_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make(tmp_path, "step-00000003", "step-00000006")
    (tmp_path / LATEST).write_text("step-00000006")
    assert find(tmp_path, "auto") == tmp_path / "step-00000006"
    assert caplog.messages == []


@pytest.mark.parametrize("resume", ["/nowhere", "x" * 5000, "", "a\0b", "/etc/passwd"])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, resume: str):
    with pytest.raises(ConfigError, match="holds no complete checkpoint; give the folder of one, or choose auto"):
        find(tmp_path, resume)


def test_what_is_set_aside_is_deleted_from_the_oldest_on(tmp_path: Path):
    for _ in range(3):
        make(tmp_path, "step-00000003", "step-00000006")
        set_aside_later(tmp_path, 0)
    make(tmp_path, *(f"step-0000000{step}" for step in range(1, 6)))
    delete_old(tmp_path, Kept(3))
    kept = ["old-2-step-00000006", "old-3-step-00000003", "old-3-step-00000006"]
    assert names_in(tmp_path) == [*kept, "step-00000003", "step-00000004", "step-00000005"]


def test_milestones_are_never_deleted_and_not_counted(tmp_path: Path):
    make(tmp_path, *(f"step-000000{step:02}" for step in range(5, 65, 5)))
    delete_old(tmp_path, Kept(2, every=20))
    assert names_in(tmp_path) == [f"step-000000{step}" for step in (20, 40, 50, 55, 60)]
    with pytest.raises(ConfigError, match="keep_every=25 is not a multiple of every=10; choose 20"):
        CheckpointSettings(every=10, keep_every=25)


def recovery(run_dir: Path, resume: str, **data: Any) -> Recovery:
    config = CheckpointSettings(every=1, keep=2, resume=resume)
    state = tiny_state()
    train_step(state, 1)
    return Recovery(config, run_dir, state, DATA | data, lambda line: None, lambda: None, lambda folder: None)


def test_a_newest_checkpoint_without_layout_is_named_and_does_not_prevent_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The checkpoint before it is offered; once the run resumed from that, the damaged one is out of the way."""
    folder = tmp_path / "checkpoints"
    first = recovery(tmp_path, "auto")
    progress = first.resume("")
    assert len(progress.run) == 12
    for step in (3, 6):
        first.save(Progress(step, step, progress.run))
    first.finish()
    first.release()
    (folder / "step-00000006" / LAYOUT).unlink()
    before = folder / "step-00000003"
    failed = recovery(tmp_path, "auto")
    with pytest.raises(ConfigError, match=rf"step-00000006/layout.json cannot be read.*--checkpoint.resume={before}"):
        failed.resume("")  # which leaves no lock that `failed` holds while it exists
    again = recovery(tmp_path, str(before))
    assert again.resume("") == Progress(3, 3, progress.run)
    again.save(Progress(6, 6, progress.run))
    again.finish()
    again.release()
    assert names_in(folder) == ["latest", "old-1-step-00000006", "step-00000003", "step-00000006"]
    assert caplog.messages == []
    other_seed = recovery(tmp_path, "auto", **{"train.seed": 9})
    assert other_seed.resume("") == Progress(6, 6, progress.run)
    other_seed.release()
    assert [message.split(",")[0] for message in caplog.messages] == ["train.seed=9"]


def test_the_only_checkpoint_without_layout_leaves_the_beginning(tmp_path: Path):
    first = recovery(tmp_path, "auto")
    first.save(Progress(3, 3, first.resume("").run))
    first.finish()
    first.release()
    (tmp_path / "checkpoints" / "step-00000003" / LAYOUT).unlink()
    with pytest.raises(ConfigError, match=r"there is no checkpoint before it; .* with --checkpoint\.resume=never$"):
        recovery(tmp_path, "auto").resume("")


def assert_saved(folder: Path) -> None:
    """Save the first step into the folder, and load it again."""
    state = tiny_state()
    saver = Saver(folder, state, kept=Kept(2), is_async=False, data=DATA)
    saver.start(Progress(1, 1, "run"))
    assert saver.wait() == folder / "step-00000001"
    assert load(folder / "step-00000001", state) == Progress(1, 1, "run")


def test_a_folder_in_the_way_of_a_save_is_set_aside(tmp_path: Path):
    make(tmp_path, "step-00000001")
    assert_saved(tmp_path)
    assert names_in(tmp_path) == ["latest", "old-1-step-00000001", "step-00000001"]


def test_a_checkpoint_is_complete_if_only_latest_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / LATEST).mkdir()  # which no file replaces
    assert_saved(tmp_path)
    assert caplog.messages == [f"{tmp_path / LATEST} cannot be written (Is a directory); the run goes on without it"]
