"""The lock of a run's folder, where it cannot be taken."""

import errno
from pathlib import Path

import pytest

from gpt.run_folder.lock import RunLock
from parallel.validation.errors import ConfigError
from parallel.world import LAUNCH_VARIABLE


@pytest.mark.parametrize(
    ("holder", "taker", "is_taken"),
    [("a 1", "a 2", True), ("a 2", "a 2", False), ("a 1", "b 2", False), ("", "a 2", False), ("a 1", "", False)],
)
def test_a_later_start_of_the_same_launch_takes_the_lock_from_a_node_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str, taker: str, is_taken: bool
):
    monkeypatch.setenv(LAUNCH_VARIABLE, holder)
    lost = RunLock(tmp_path)
    lost.take()
    monkeypatch.setenv(LAUNCH_VARIABLE, taker)
    later, refused = RunLock(tmp_path), RunLock(tmp_path)
    if is_taken:
        later.take()
    with pytest.raises(ConfigError, match="in use by another job"):
        refused.take()
    for lock in (lost, later):
        lock.release()


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
