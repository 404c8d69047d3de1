"""The version of the code that W&B is told: the commit, and if files differ from it."""

import subprocess
from pathlib import Path
from unittest import mock

from gpt.monitor import wandb_sink


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
