"""The lock of a run's folder, where it cannot be taken."""

import errno
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock

from gpt.run_folder.lock import RunLock
from parallel.errors import ConfigError


def test_a_second_job_is_refused_until_the_first_ends(tmp_path: Path):
    first, second = RunLock(tmp_path / "run"), RunLock(tmp_path / "run")
    first.take()
    first.take()  # a second time by the same object is no error
    with pytest.raises(ConfigError, match=r"run is in use by another job, which holds .*; wait until it ends"):
        second.take()
    first.release()
    second.take()
    second.release()


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with mock.patch.object(FileLock, "acquire", side_effect=OSError(errno.ENOLCK, "No locks available")):
        RunLock(tmp_path).take()
    assert "cannot be locked (No locks available); do not start a second job there" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run.dir=.*file/run cannot be written \(Not a directory\); choose another"):
        RunLock(tmp_path / "file" / "run").take()
