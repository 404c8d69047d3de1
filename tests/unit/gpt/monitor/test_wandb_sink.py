"""W&B is told the commit of the code, with a mark if files differ from it, and of existing checkpoints only."""

import subprocess
from pathlib import Path
from unittest import mock

from wandb.errors import CommError

from gpt.monitor import wandb_sink
from gpt.monitor.wandb_sink import WandbRun
from gpt.settings.run import WandbSettings


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def version_in(folder: Path) -> str:
    with mock.patch.object(wandb_sink, "__file__", str(folder / "wandb_sink.py")):
        return wandb_sink.code_version()


def test_the_version_of_the_code_is_its_commit_and_says_if_files_differ(tmp_path: Path):
    assert version_in(tmp_path) == "unknown"
    git(tmp_path, "init", "-q")
    assert version_in(tmp_path) == "unknown", "there is no commit yet"
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "first")
    assert version_in(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "a").write_text("2")
    assert version_in(tmp_path) == git(tmp_path, "rev-parse", "HEAD") + "+changes"


def sink_of(folder: Path, *starts: object) -> tuple[WandbRun, list[str]]:
    """Return a sink whose attempts to start a run end so, and the modes of these attempts."""
    with mock.patch("wandb.init", side_effect=starts) as init, mock.patch("wandb.teardown"):
        sink = WandbRun(WandbSettings(mode="online"), folder, {}, is_same_run=False)
    return sink, [call.kwargs["mode"] for call in init.call_args_list]


def test_a_run_is_logged_offline_if_the_server_cannot_be_reached(tmp_path: Path):
    assert sink_of(tmp_path, CommError("no network"), mock.Mock(id="abc"))[1] == ["online", "offline"]


def test_a_checkpoint_that_is_deleted_before_it_is_logged_is_left_out(tmp_path: Path):
    sink, _ = sink_of(tmp_path, run := mock.Mock(id="abc"))
    kept, deleted = tmp_path / "step-00000004", tmp_path / "step-00000002"
    kept.mkdir()
    for checkpoint in (deleted, kept):
        sink.log_checkpoint(checkpoint)
    (call,) = run.log_artifact.call_args_list
    assert call.kwargs["aliases"] == ["latest", "step-00000004"]


def test_the_summary_of_a_run_is_recorded_without_its_texts(tmp_path: Path):
    sink, _ = sink_of(tmp_path, run := mock.Mock(id="abc", summary={"loss": 2.0}))
    sink.finish({"loss": 1.5, "mfu": 0.4, "samples": [{"prompt": "a", "text": "b"}]}, 3)
    assert run.summary == {"loss": 1.5, "mfu": 0.4}
    run.finish.assert_called_once_with(exit_code=3)
