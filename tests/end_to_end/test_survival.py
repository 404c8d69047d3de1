"""Runs that are killed, stopped by a signal, hang, or find their disk full."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor

from data.tokenizer import load_tokenizer
from gpt.builder.loss_guard import LossGuard
from gpt.monitor import watch
from gpt.run_folder.files import read_steps
from gpt.settings.parser import parse_settings
from lab.faults.failing_run import Fault
from parallel.validation.errors import ConfigError
from parallel.world import start_world
from pretrain_gpt import pretrain
from tests.end_to_end.runs import TWO_RANKS, options, run, said_by, started_ranks
from tests.programs import (
    HANG_SECONDS,
    ROOT,
    files_of_at_most,
    run_program,
    run_python,
    start_forked,
    wait_for_end,
    wait_until,
)
from zero.checkpoint import writer

LONG = {"train__steps": 10_000, "model__dropout": 0.1}


def losses(records: list[dict]) -> list[tuple]:
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


@pytest.mark.parametrize(
    ("num_steps", "kills"),
    [
        (6, [Fault(0, 0, "save.rename", 2)]),
        pytest.param(10, [Fault(0, 1, "reduce", 25), Fault(1, 0, "save.rename", 1)], marks=pytest.mark.full),
    ],
    ids=["while it saves", "again and again"],
)
def test_a_run_that_is_killed_equals_an_undisturbed_one(corpus, tmp_path, num_steps, kills):
    settings = {"train__steps": num_steps, "checkpoint__every": 2, "model__dropout": 0.1, "zero__stage": 3}
    undisturbed = run(2, corpus, tmp_path / "undisturbed", **settings)
    arguments = options(corpus, tmp_path / "killed", **settings)
    for attempt in range(len(kills) + 1):
        faults = [word for fault in kills for word in ("--fault", str(fault))]
        program = ("-m", "lab.faults.failing_run", *faults, "--", *arguments)
        with started_ranks(tmp_path, run_program, *program, TORCHELASTIC_RESTART_COUNT=str(attempt)) as ranks:
            codes = [wait_for_end(rank) for rank in ranks]
        assert -signal.SIGKILL in codes if attempt < len(kills) else codes == [0, 0]
    assert losses(read_steps(tmp_path / "killed")) == losses(undisturbed)
    last = json.loads((tmp_path / "killed" / "checkpoints" / f"step-{num_steps:08d}" / "layout.json").read_text())
    assert last["data"] == {
        "train.seed": 1234,
        "train.initial_weights": None,
        "data.split": [0.8, 0.1, 0.1],
        "data.packing": "stream",
        "data.mask_documents": False,
        "train.compile": "none",
        "data.path": str(corpus),
        "tokenizer": load_tokenizer(corpus).vocabulary_hash,
    }
    assert last["progress"]["step"] == num_steps


def wait_for_steps(run_dir: Path, number: int, is_running: Callable[[], bool]) -> None:
    wait_until(lambda: len(read_steps(run_dir)) >= number or not is_running())
    assert len(read_steps(run_dir)) >= number, f"ended with fewer than {number} steps"


def test_a_signal_to_one_rank_makes_all_save_the_same_step_and_end_with_code_0(corpus, tmp_path):
    run_dir = tmp_path / "run"
    with started_ranks(tmp_path, run_program, "pretrain_gpt.py", *options(corpus, run_dir, **LONG)) as ranks:
        wait_for_steps(run_dir, 3, ranks[1].is_alive)
        os.kill(ranks[1].pid, signal.SIGUSR1)
        assert [wait_for_end(rank) for rank in ranks] == [0, 0]
    (saved,) = (run_dir / "checkpoints").glob("step-*")
    last = read_steps(run_dir)[-1]["step"]
    assert saved.name == f"step-{last:08d}"
    more = {**LONG, "train__steps": last + 3, "schedule__decay": "constant"}
    resumed = run(2, corpus, run_dir, **more)
    assert [record["step"] for record in resumed] == list(range(1, last + 4))


@pytest.mark.full
def test_ctrl_c_at_a_launcher_saves_a_checkpoint_and_prints_no_traceback(corpus, tmp_path):
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, *TWO_RANKS, "pretrain_gpt.py", *options(corpus, run_dir, **LONG)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        wait_for_steps(run_dir, 3, lambda: launcher.poll() is None)
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        printed, errors = launcher.communicate(timeout=HANG_SECONDS)
    assert launcher.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors
    last = read_steps(run_dir)[-1]["step"]
    assert f"stopped by a signal after step {last}; start again to resume" in printed
    assert (run_dir / "checkpoints" / f"step-{last:08d}" / "layout.json").exists()


def test_a_rank_whose_peer_is_killed_ends_with_one_line_and_the_code_of_the_watchdog(corpus, tmp_path):
    run_dir = tmp_path / "run"
    with started_ranks(tmp_path, run_program, "pretrain_gpt.py", *options(corpus, run_dir, **LONG)) as ranks:
        wait_for_steps(run_dir, 3, ranks[0].is_alive)
        ranks[1].kill()
        assert wait_for_end(ranks[0]) == 3
    said = said_by(tmp_path, 0).read_text()
    assert re.findall("^error: .*", said, re.MULTILINE) == [said.splitlines()[-1]]
    assert "error: another rank or its node was lost (Connection" in said


def run_with_frequent_beats(*arguments: str) -> None:
    writer.WAIT_SECONDS = writer.BEAT_SECONDS = 0.2
    writer.LOST_SECONDS = 1.0
    run_program(*arguments)


def test_a_rank_that_waits_for_a_save_ends_if_another_one_was_killed_in_it(corpus, tmp_path):
    arguments = options(corpus, tmp_path / "run", train__steps=1, checkpoint__every=1, run__hang_seconds=0)
    program = "-m", "lab.faults.failing_run", "--fault", "0:1:save.middle:1", "--", *arguments
    with started_ranks(tmp_path, run_with_frequent_beats, *program, TORCHELASTIC_RESTART_COUNT="0") as ranks:
        assert wait_for_end(ranks[0]) == 3
    assert "error: another rank or its node was lost (Connection closed" in said_by(tmp_path, 0).read_text()


def run_until_told_to_hang(hangs: Path, *arguments: str) -> None:
    """Run a training whose watchdog's clock stands still until a file exists.

    So on a slow machine, too, nothing but what hangs exceeds the limit.
    """
    watch.Watchdog = functools.partial(watch.Watchdog, clock=lambda: time.monotonic() if hangs.exists() else 0.0)
    run_program("pretrain_gpt.py", *arguments)


def test_a_rank_that_hangs_is_named_with_its_last_collective_and_the_job_ends(corpus, tmp_path):
    run_dir = tmp_path / "run"
    arguments = options(corpus, run_dir, run__hang_seconds=2, **LONG)
    with started_ranks(tmp_path, run_until_told_to_hang, tmp_path / "HANGS", *arguments) as ranks:
        wait_for_steps(run_dir, 5, ranks[0].is_alive)
        os.kill(ranks[1].pid, signal.SIGSTOP)
        (tmp_path / "HANGS").touch()
        assert wait_for_end(ranks[0]) == 3
    said = said_by(tmp_path, 0).read_text()
    next_one = r"\w+ of [\d,]+ bytes along the \w+ axis in \w+ at \w+/\w+\.py:\d+"
    found = (
        rf"error: rank 1 does not answer: \d+ of its \d+ collectives are complete, the \w+ one is {next_one}; the job"
    )
    assert re.search(rf"{found} ends \(run.hang_seconds\)", said), said
    (report,) = (run_dir / "hang").iterdir()
    assert report.name == "rank-0.json"
    assert json.loads(report.read_text())["collectives"][-1]["state"] == "reached"


def run_that_hangs_in(place: str, *arguments: str) -> None:
    with mock.patch(place, side_effect=lambda *_args, **_options: threading.Event().wait()):
        run_program("pretrain_gpt.py", *arguments)


@pytest.mark.parametrize(
    "place", ["pretrain_gpt.build", "gpt.trainer.Recovery.resume", "parallel.mesh.Axis.all_gather"], ids=str
)
def test_a_hang_before_the_first_step_ends_the_job_as_a_later_one(corpus, tmp_path, place):
    arguments = options(corpus, tmp_path / "run", run__hang_seconds=0.5, zero__stage=3)
    rank = start_forked(tmp_path / "said", run_that_hangs_in, place, *arguments)
    assert wait_for_end(rank) == 3
    assert "error: rank 0 has made no progress for 0.5 s: " in (tmp_path / "said").read_text()


STEP_6_FAILS = r"checkpoint of step 6 cannot be written to .*: "


def test_a_write_that_fails_costs_the_checkpoint_not_the_run_nor_the_checkpoint_before(
    corpus, tmp_path, caplog, capsys
):
    """From the second checkpoint on, the system limits the size of files to less than a checkpoint needs."""
    run_dir = tmp_path / "run"
    settings = {"checkpoint__every": 2, "schedule__decay": "constant"}
    first = run(1, corpus, run_dir, **settings, train__steps=2)
    before = {path: path.read_bytes() for path in (run_dir / "checkpoints").rglob("*") if path.is_file()}
    for _ in range(2):
        with files_of_at_most(50_000), pytest.raises(ConfigError, match=STEP_6_FAILS + "rank 0: File too large"):
            pretrain(parse_settings(options(corpus, run_dir, **settings)), start_world())
        assert {path: path.read_bytes() for path in (run_dir / "checkpoints").rglob("*") if path.is_file()} == before
        assert re.search(r"error: checkpoint of step 4 cannot be .*; training goes on", caplog.text)
        assert "step-00000002, after step 2" in " ".join(capsys.readouterr().out.split())
        assert losses(read_steps(run_dir))[:2] == losses(first)
        assert len(read_steps(run_dir)) == 6


@pytest.mark.full
def test_a_full_disk_costs_no_step_and_is_told_in_lines(corpus, tmp_path):
    """After the settings there is room for a few records; neither plots, profiles nor sinks find any."""
    settings = {"train__steps": 20, "run__tensorboard": True, "wandb__mode": "offline"}
    with small_disk(tmp_path / "run", 3 * 4096, "rw"):
        ended = run_python("pretrain_gpt.py", *options(corpus, tmp_path / "run", **settings))
    assert ended.returncode == 0
    assert " 20/20 " in ended.stdout
    assert "Traceback" not in ended.stderr
    assert re.search(r"metrics.jsonl cannot be written \(No space left on device\); the run goes on", ended.stderr)


@pytest.mark.full
@pytest.mark.parametrize(("mode", "reason"), [("rw", "No space left on device"), ("ro", "Read-only file system")])
def test_a_small_or_read_only_disk_costs_the_checkpoints_not_the_run(corpus, tmp_path, mode, reason):
    """The checkpoints are on a file system of their own, which only root can mount."""
    with small_disk(tmp_path / "run" / "checkpoints", 100_000, mode):
        for _ in range(2):
            with pytest.raises(ConfigError, match=STEP_6_FAILS + f"rank 0: {reason}"):
                pretrain(parse_settings(options(corpus, tmp_path / "run", checkpoint__every=3)), start_world())
            assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
            assert len(read_steps(tmp_path / "run")) == 6


@contextmanager
def small_disk(folder: Path, num_bytes: int, mode: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes},{mode}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Bad:
    """A judgement of the guard that is forced to "bad" in chosen calls."""

    def __init__(self, *calls: int):
        self._calls, self._judge, self._num_calls = calls, LossGuard.judge, 0

    def __call__(self, guard: LossGuard, loss: Tensor) -> Tensor:
        self._num_calls += 1
        return self._judge(guard, loss * float("nan") if self._num_calls in self._calls else loss)


def guarded(corpus: Path, run_dir: Path, bad_steps: list[int], **settings: object) -> list[dict]:
    bad = Bad(*bad_steps)
    with mock.patch.object(LossGuard, "judge", lambda guard, loss: bad(guard, loss)):
        pretrain(parse_settings(options(corpus, run_dir, schedule__decay="constant", **settings)), start_world())
    return read_steps(run_dir)


def test_a_bad_loss_skips_its_step_only(corpus, tmp_path):
    good = run(1, corpus, tmp_path / "good", schedule__decay="constant")
    found = guarded(corpus, tmp_path / "run", [3], guard__spike_factor=5)
    assert losses(found[:3]) == losses(good[:3])
    assert [record["skipped_steps"] for record in found] == [0, 0, 1, 1, 1, 1]
    assert found[3]["loss"] != good[3]["loss"]


def test_a_run_rolls_back_and_leaves_the_samples_of_a_bad_loss_out(corpus, tmp_path):
    settings = {"guard__policy": "roll_back", "checkpoint__every": 2}
    good = run(1, corpus, tmp_path / "good", schedule__decay="constant", **settings)
    found = guarded(corpus, tmp_path / "run", [5], **settings)
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
    assert losses(found[:4]) == losses(good[:4])
    assert found[4]["tokens"] == good[4]["tokens"] + 8 * 16  # the samples of the bad step are left out
    assert found[5]["skipped_steps"] == 0


def test_a_run_rolls_back_before_it_saves_a_checkpoint_after_a_bad_loss(corpus, tmp_path, capsys):
    settings = {"guard__policy": "roll_back", "checkpoint__every": 2, "train__log_every": 10}
    guarded(corpus, tmp_path / "run", [3], **settings)
    said = "".join(capsys.readouterr().out.split())
    assert f"rolledbackfromstep4to{tmp_path}/run/checkpoints/step-00000002;" in said


def test_a_run_that_is_stopped_after_a_bad_loss_saves_nothing(corpus, tmp_path, capsys):
    bad, losses_so_far = Bad(2), count(1)  # the first step is logged

    def judge_and_stop(guard: LossGuard, loss: Tensor) -> Tensor:
        if next(losses_so_far) == 2:
            signal.raise_signal(signal.SIGTERM)
        return bad(guard, loss)

    every = {"checkpoint__every": 10**6, "train__log_every": 10**6, "train__steps": 10**6}
    settings = {"guard__policy": "roll_back", "schedule__decay": "constant"} | every
    with mock.patch.object(LossGuard, "judge", judge_and_stop):
        pretrain(parse_settings(options(corpus, tmp_path / "run", **settings)), start_world())
    assert "afterabadloss:notsaved" in "".join(capsys.readouterr().out.split())
    assert not [*(tmp_path / "run").glob("checkpoints/step-*")]


def test_too_many_bad_losses_in_a_row_end_the_run(corpus, tmp_path):
    with pytest.raises(ConfigError, match=r"the last 3 steps, up to step 5, updated nothing.*max_skipped_steps=3"):
        guarded(corpus, tmp_path / "run", [1, 3, 4, 5], guard__spike_factor=5, guard__max_skipped_steps=3)
