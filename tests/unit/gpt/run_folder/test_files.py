"""The files of a run's folder: damaged lines, full disks, and what a resumed run keeps."""

import errno
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import strategies as st

from gpt.run_folder.files import (
    NUMBERS_OF_A_STEP,
    MetricsFile,
    append_records,
    cut_metrics,
    read_steps,
    start_run,
    written_if_possible,
)
from parallel.validation.errors import ConfigError
from tests.fuzz import fuzzed, run_examples
from tests.programs import files_of_at_most

METRICS = "metrics.jsonl"


def record(step: int, **others: object) -> dict:
    return {"step": step} | dict.fromkeys(NUMBERS_OF_A_STEP, 1.5 * step) | others


def steps_in(folder: Path) -> list[int]:
    return [found["step"] for found in read_steps(folder)]


def text(**others: object) -> bytes:
    return json.dumps(record(3) | others).encode() + b"\n"


DAMAGED = [
    b"\n",
    b'{"step": 3, "loss": "\xff"}\n',
    b"[3]\n",
    b'{"step": 3}\n',
    text(step="3"),
    text(lr=[1]),
    text(tokens=10**400),
    text(samples="def"),
    text(samples=[{"prompt": "def", "text": "x"}, {"prompt": "def", "text": 5}]),
    text(samples=[{"text": "x"}]),
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_left_out_named_and_removed_when_the_run_resumes(tmp_path, caplog, line):
    append_records(tmp_path, [record(1), record(2)])
    damaged = (tmp_path / METRICS).read_bytes() + line
    (tmp_path / METRICS).write_bytes(damaged)
    append_records(tmp_path, [record(4), record(5)])
    damaged += (tmp_path / METRICS).read_bytes()[len(damaged) :]
    assert steps_in(tmp_path) == [1, 2, 4, 5]
    assert "metrics.jsonl: 1 lines cannot be read, the first is line 3" in caplog.text
    cut_metrics(tmp_path, 4)
    assert "1 of 5 lines cannot be read, among them number 3; they are removed, and the old file is kept" in caplog.text
    caplog.clear()
    assert steps_in(tmp_path) == [1, 2, 4]
    assert caplog.text == ""
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == damaged
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.1.jsonl", METRICS]


def test_a_line_that_a_crash_has_cut_is_left_out_and_does_not_spoil_the_next(tmp_path, caplog):
    append_records(tmp_path, [record(1), record(2)])
    whole = (tmp_path / METRICS).read_bytes()
    (tmp_path / METRICS).write_bytes(whole[:-5])
    assert steps_in(tmp_path) == [1]
    assert caplog.text == ""
    append_records(tmp_path, [record(3)])
    assert steps_in(tmp_path) == [1, 3]
    (tmp_path / METRICS).write_bytes(whole[:1])
    append_records(tmp_path, [record(3)])
    assert steps_in(tmp_path) == [3]
    (tmp_path / METRICS).write_bytes(whole[:-5])
    cut_metrics(tmp_path, 2)
    append_records(tmp_path, [record(2)])
    assert (tmp_path / METRICS).read_bytes() == whole


@fuzzed(few=100, many=2000)
def test_other_lines_survive_any_damage(num_examples, tmp_path):
    """A change that leaves a line readable may change its numbers: a record is no state of the run."""
    append_records(tmp_path, [record(step) for step in range(1, 9)])
    whole = (tmp_path / METRICS).read_bytes()
    lines = whole.split(b"\n")

    def check(place: int, inserted: bytes, num_removed: int) -> None:
        damaged = whole[:place] + inserted + whole[place + num_removed :]
        (tmp_path / METRICS).write_bytes(damaged)
        untouched = {number for number, line in enumerate(lines[:-1], 1) if line in damaged.split(b"\n")[:-1]}
        assert untouched <= set(steps_in(tmp_path))
        cut_metrics(tmp_path, 8)
        append_records(tmp_path, [record(9)])
        assert untouched <= set(steps_in(tmp_path))
        assert steps_in(tmp_path)[-1] == 9
        for path in tmp_path.glob("metrics.*.jsonl"):
            path.unlink()

    run_examples(num_examples, check, st.integers(0, len(whole)), st.binary(max_size=8), st.integers(0, 8))


def test_numbers_that_are_not_finite_are_null_in_the_file_and_nan_when_read(tmp_path):
    append_records(tmp_path, [record(1, loss=math.inf, mfu=None)])
    assert json.loads((tmp_path / METRICS).read_text())["loss"] is None
    (found,) = read_steps(tmp_path)
    assert math.isnan(found["loss"])
    assert found["mfu"] is None


def test_generated_texts_are_read_as_they_were_written(tmp_path):
    samples = [{"prompt": "def", "text": "def f():\n    return '\u2028\ufffd'"}, {"prompt": "", "text": ""}]
    append_records(tmp_path, [record(1, samples=samples), record(2)])
    assert [found.get("samples") for found in read_steps(tmp_path)] == [samples, None]


def test_a_record_of_a_full_disk_is_written_when_there_is_room(tmp_path, caplog):
    metrics = MetricsFile(tmp_path)
    metrics.append(record(1))
    whole = (tmp_path / METRICS).read_bytes()
    with files_of_at_most(len(whole) + 10):
        for step in (2, 3, 4):
            metrics.append(record(step))
            assert (tmp_path / METRICS).read_bytes() == whole
        metrics.roll_back(3)
        metrics.close()
    assert caplog.text.count("cannot be written (File too large); the run goes on") == 1
    assert "metrics.jsonl lacks 2 records, for which there was no room" in caplog.text
    metrics.append(record(4))
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_steps_are_removed_without_room_on_the_disk(tmp_path):
    append_records(tmp_path, [record(step) for step in range(1, 5)])
    with files_of_at_most(0):
        cut_metrics(tmp_path, 2)
    assert steps_in(tmp_path) == [1, 2]
    (tmp_path / METRICS).write_bytes(b"\n" + (tmp_path / METRICS).read_bytes())
    with files_of_at_most(0), pytest.raises(ConfigError, match=r"metrics.jsonl cannot be written \(File too large\)"):
        cut_metrics(tmp_path, 2)


def test_steps_after_the_last_one_are_removed_wherever_they_are(tmp_path, caplog):
    append_records(tmp_path, [record(1), record(3), record(2)])
    cut_metrics(tmp_path, 2)
    assert steps_in(tmp_path) == [1, 2]
    assert f"{METRICS}: steps after 2 are among earlier ones; they are removed, and the old file is kept" in caplog.text
    assert (tmp_path / "metrics.1.jsonl").exists()


def test_the_metrics_are_never_missing_while_steps_are_removed(tmp_path, monkeypatch):
    append_records(tmp_path, [record(1), record(3), record(2)])
    whole = (tmp_path / METRICS).read_bytes()

    def end(*_paths: Path) -> None:
        raise OSError(errno.EIO, "the node is lost")

    monkeypatch.setattr(Path, "replace", end)
    with pytest.raises(ConfigError, match="the node is lost"):
        cut_metrics(tmp_path, 2)
    assert (tmp_path / METRICS).read_bytes() == whole


def test_a_record_of_a_rank_without_memory_is_no_step_and_no_damage(tmp_path, caplog):
    folder = tmp_path / "of" / "runs"  # which may not exist if a rank has no memory from the start
    append_records(folder, [record(1), {"step": 2, "out_of_memory": {"rank": 3}}])
    assert steps_in(folder) == [1]
    cut_metrics(folder, 1)
    assert len((folder / METRICS).read_bytes().splitlines()) == 1
    assert caplog.text == ""


def test_a_run_that_begins_renames_what_earlier_runs_left_and_one_that_goes_on_keeps_it(tmp_path):
    folder = tmp_path / "of" / "runs"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_bytes(b"\xff\xfe")  # damaged
    for number in range(3):
        start_run(folder, f"{number}", last_step=0)
        append_records(folder, [record(step) for step in range(1 + number, 5)])
    start_run(folder, "2", last_step=3)
    assert steps_in(folder) == [3]
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    metrics = {f"metrics.{number}jsonl" for number in ("", "1.", "2.")}
    assert found.keys() == metrics | {f"config.{number}yaml" for number in ("", "1.", "2.", "3.")}
    assert [found[f"config.{number}yaml"] for number in ("1.", "2.", "3.", "")] == [b"\xff\xfe", b"0", b"1", b"2"]
    assert [found[f"metrics.{number}.jsonl"].count(b"\n") for number in (1, 2)] == [4, 3]


def test_a_folder_of_a_run_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run.dir=.*file/run cannot be written \(Not a directory\); choose another"):
        start_run(tmp_path / "file" / "run", "", last_step=0)


def test_a_file_that_training_does_not_need_costs_a_warning_and_leaves_nothing(tmp_path, caplog):
    with written_if_possible(tmp_path / "plot"):
        (tmp_path / "plot").write_text("a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "plot cannot be written (No space left on device); the run goes on without it" in caplog.text
    assert list(tmp_path.iterdir()) == []
