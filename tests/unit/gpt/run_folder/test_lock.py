"""The lock of a run's folder, where it cannot be taken."""

import errno
from pathlib import Path

import pytest

from gpt.run_folder.lock import RunLock
from parallel.errors import ConfigError


def test_a_second_job_is_refused_until_the_first_ends(tmp_path: Path):
    first, second = RunLock(tmp_path / "all" / "run"), RunLock(tmp_path / "all" / "run")
    first.take()
    first.take()  # a second time by the same object is no error
    with pytest.raises(ConfigError, match=r"run is in use by another job, which holds .*; wait until it ends"):
        second.take()
    first.release()
    second.take()
    second.release()


@pytest.mark.parametrize("missing", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: int
):
    def flock(*_: object) -> None:
        raise OSError(missing, "Not here")

    monkeypatch.setattr("fcntl.flock", flock)
    for _ in range(2):
        RunLock(tmp_path).take()
    assert caplog.text.count("cannot be locked (Not here); do not start a second job there") == 2


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run.dir=.*file/run cannot be written \(Not a directory\); choose another"):
        RunLock(tmp_path / "file" / "run").take()
