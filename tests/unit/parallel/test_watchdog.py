"""The rank for which the others wait is found from the heartbeats."""

import itertools
import json
import os
import queue
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel import comm_log
from parallel.comm_log import CommLog
from parallel.ending import EXIT_LOST
from parallel.watchdog import Heartbeat, Watchdog, describe_hang

NEXT = "all_reduce of 8 bytes along the data axis in update"
WAITING = Heartbeat(40, 30.0, num_launched=100, num_reached=100, num_complete=99, next=NEXT)
BEFORE = dict.fromkeys(range(4), WAITING)
AFTER = dict.fromkeys(range(4), replace(WAITING, tick=43))


def verdict(rank: int, **changed: Any) -> str | None:
    """Return the verdict if a rank differs from the others."""
    found = describe_hang(BEFORE, AFTER | {rank: replace(AFTER[rank], **changed)}, 20.0, 4)
    return found and found.reason


@pytest.mark.parametrize(
    ("rank", "changed", "said"),
    [
        (2, {"num_launched": 99, "num_reached": 99}, "99 of its 99 collectives are complete, the last one is all_re"),
        # The hosts of ranks that wait have launched what they could; that of rank 3 was the fastest.
        (3, {"num_launched": 150, "num_reached": 99}, "99 of its 150 collectives are complete, the next one is all_re"),
        (1, {"num_launched": 80, "num_reached": 80, "num_complete": 80}, "80 of its 80 collectives are complete"),
    ],
)
def test_a_rank_whose_host_or_device_is_behind_those_of_the_others_is_named(rank, changed, said):
    found = verdict(rank, **changed)
    assert found.startswith(f"rank {rank} has made no progress for 20 s: {said}")
    assert found.count("rank ") == 1


def test_a_rank_without_new_heartbeats_is_named():
    said = f"99 of its 100 collectives are complete, the next one is {NEXT}; the job ends"
    assert verdict(3, tick=40).startswith(f"rank 3 does not answer: {said}")
    without = {rank: AFTER[rank] for rank in (1, 2, 3)}
    found = describe_hang(BEFORE, without, 20.0, 4)
    assert found.reason.startswith("rank 0 does not answer: its collectives are unknown")
    assert found.num_alive == 3


def test_no_rank_is_named_while_any_makes_progress():
    assert verdict(1, idle_seconds=1.0, num_complete=1) is None
    assert verdict(1, idle_seconds=9.9) is None
    assert verdict(1, idle_seconds=10.0)


@pytest.mark.parametrize(
    ("hang_seconds", "step_seconds", "expected"),
    [(600, 2, 180), (600, 30, 300), (600, 100, 600), (3600, 2, 1080), (8, 0.1, 8), (300, 2, 180)],
)
def test_less_time_is_a_hang_once_the_time_of_a_step_is_known(hang_seconds, step_seconds, expected):
    """Seen within 5 minutes by default: after 180 s, and five polls of 18 s."""
    clock, store = mock.Mock(return_value=0.0), dist.HashStore()
    watchdog = Watchdog(store, 0, 1, CommLog(), hang_seconds, clock=clock)

    def is_reported(idle_seconds: float) -> bool:
        clock.return_value += idle_seconds
        return watchdog._may_report()

    for number in range(6):
        clock.return_value += 1000 if number == 3 else step_seconds  # one step is a long one
        watchdog.begin_step()
        watchdog.beat()
        assert not is_reported(0.0)
    assert not is_reported(expected)
    assert is_reported(0.5)


def test_ranks_that_are_alike_are_named_in_one_line():
    found = verdict(0)
    assert all(f"rank {rank} has made no progress" in found for rank in range(4))
    assert "\n" not in found
    assert "more ranks" not in found
    before, after = (dict.fromkeys(range(6), beats[0]) for beats in (BEFORE, AFTER))
    found = describe_hang(before, after, 20.0, 6).reason
    assert found.count("has made no progress") == 4
    assert "rank 3 has" in found
    assert found.endswith("in update; and 2 more ranks; the job ends (run.hang_seconds)")


class Device:
    """A GPU that runs what the host has queued up to a mark, and then hangs."""

    def __init__(self, num_passed: int):
        self._num_passed, self._num_marks = num_passed, 0

    def mark(self) -> SimpleNamespace:
        self._num_marks += 1
        return SimpleNamespace(query=lambda number=self._num_marks: number <= self._num_passed)


def progress_of(monkeypatch, num_passed: int, num_waited: int = 5) -> tuple[int, int, int, str]:
    monkeypatch.setattr(comm_log, "mark_on_gpu", Device(num_passed).mark)
    log = CommLog()
    log.follow(torch.device("cuda", 0))
    for number in range(5):
        event = log.record(f"gather {number}", "data", 4, torch.zeros(1))
        if number < num_waited:
            log.record_wait_end(event)
    now = log.progress()
    return now.num_launched, now.num_reached, now.num_complete, now.next.op


def test_the_device_says_what_is_reached_and_complete_and_not_the_host(monkeypatch):
    assert progress_of(monkeypatch, 10) == (5, 5, 5, "gather 4")
    assert progress_of(monkeypatch, 4) == (5, 2, 2, "gather 2")  # two marks a collective
    assert progress_of(monkeypatch, 5) == (5, 3, 2, "gather 2")
    assert progress_of(monkeypatch, 10, num_waited=3) == (5, 5, 3, "gather 3")
    log = CommLog()
    log.record_wait_end(log.record("gather", "data", 4, torch.zeros(1)))
    assert log.progress().num_complete == 1  # on a CPU, the host has waited


# The end of a process is that of its thread.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Job:
    """Three watchdogs with one clock, and what they have done, in order."""

    def __init__(self) -> None:
        self.store, self.now, self.happened = mock.Mock(wraps=dist.HashStore()), 100.0, queue.SimpleQueue()
        self.logs = [CommLog() for _ in range(3)]
        self.ranks = [
            Watchdog(self.store, rank, 3, log, 0.05, self.abort, lambda: self.now) for rank, log in enumerate(self.logs)
        ]

    def abort(self, reason: str) -> None:
        self.happened.put(reason)
        raise OSError("No space left on device")  # a report that fails is one, too

    def end(self, code: int) -> None:
        self.happened.put(code)
        raise SystemExit

    def next(self) -> str | int:
        """Return what happens next."""
        return self.happened.get(timeout=60)

    def heartbeat(self, rank: int) -> Heartbeat:
        """Return a heartbeat of a rank that has begun after this call."""
        first = self.read(rank).tick
        while (found := self.read(rank)).tick < first + 2:
            time.sleep(0.001)
        return found

    def read(self, rank: int) -> Heartbeat:
        return Heartbeat(**json.loads(self.store.get(f"watch/{rank}")))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job()
    monkeypatch.setattr(os, "_exit", job.end)
    return job


def test_a_rank_makes_progress_when_its_device_does_or_a_phase_begins_and_not_when_its_host_launches(job):
    log, idle_seconds = job.logs[0], []
    log.follow(torch.device("cpu"))
    with job.ranks[0].running():
        for act in (
            lambda: log.record("gather", "data", 4, torch.zeros(1)),
            job.ranks[0].beat,
            lambda: log.during("forward").__enter__(),
            lambda: None,
        ):
            act()
            job.heartbeat(0)
            job.now += 0.02
            idle_seconds.append(job.heartbeat(0).idle_seconds)
    assert idle_seconds == pytest.approx([0.02, 0.02, 0.02, 0.04])


def test_a_rank_that_is_busy_counts_as_one_that_makes_progress(job):
    with job.ranks[0].running(), job.logs[0].busy():
        for _ in range(2):
            job.now += 20.0
            assert job.heartbeat(0).idle_seconds == 0


def test_a_rank_whose_device_has_failed_keeps_its_last_progress_and_is_named(job):
    log = job.logs[0]
    log.record_wait_end(log.record("gather", "data", 4, torch.zeros(1)))
    with job.ranks[0].running():
        log.newest[0].end_mark = mock.Mock(query=mock.Mock(side_effect=torch.AcceleratorError("CUDA error")))
        assert job.heartbeat(0).num_complete == 1
        job.now += 20.0
        assert "rank 1 does not answer" in job.next()


def test_all_ranks_report_one_verdict_before_any_ends(job):
    """The launcher kills all ranks when the first one ends."""
    writers: dict[str, int] = {}
    seen: dict[tuple[int, str], bytes] = {}
    store = dist.HashStore()
    job.store.configure_mock(**{f"{name}.side_effect": getattr(store, name) for name in ("add", "check", "wait")})

    def write(key: str, value: str) -> None:
        writers[key] = threading.get_ident()
        store.set(key, value)

    def read_next(key: str) -> bytes:
        """Wait for the next heartbeat of another rank, whose thread may get no processor for longer than some polls."""
        reader = threading.get_ident()
        while (found := store.get(key)) == seen.get((reader, key)) and writers[key] != reader:
            time.sleep(0.001)
        seen[reader, key] = found
        return found

    job.store.set.side_effect, job.store.get.side_effect = write, read_next
    with job.ranks[0].running(), job.ranks[1].running(), job.ranks[2].running():
        job.now += 20.0
        reasons, codes = ([job.next() for _ in range(3)] for _ in range(2))
    assert reasons[0].startswith("rank 0 has made no progress for 0.05 s: 0 of its 0 collectives are complete")
    assert reasons == reasons[:1] * 3
    assert codes == [EXIT_LOST] * 3


def test_ranks_whose_processes_have_ended_are_named_and_not_waited_for(job):
    with job.ranks[1].running():
        pass  # writes no more heartbeats, and rank 2 never has
    with job.ranks[0].running():
        job.now += 20.0
        reason, code = job.next(), job.next()
    assert reason.startswith("rank 1 does not answer: 0 of its 0 ")
    assert "; rank 2 does not answer: its collectives are unknown; the job" in reason
    assert code == EXIT_LOST


def test_another_rank_reports_if_the_one_that_was_to_do_so_has_stopped(job):
    with job.ranks[1].running():
        pass
    job.store.add("watch/num_reporters", 1)  # by rank 1, before it stopped
    with job.ranks[0].running():
        job.now += 20.0
        job.heartbeat(0)
        assert job.happened.empty()
        job.now += 0.1
        assert job.next().startswith("rank 1 does not answer")


def test_a_rank_that_finds_another_one_at_work_reports_again_after_half_of_the_time(job):
    ticks = itertools.count()

    def get(key: str) -> Any:
        if key == "watch/1":  # it has made progress whenever it is read
            job.store.set(key, json.dumps(asdict(replace(WAITING, tick=next(ticks), idle_seconds=0.0))))
        return mock.DEFAULT

    job.store.get.side_effect = get
    job.store.set("watch/1", "")
    with job.ranks[0].running():
        job.now += 20.0
        while job.read(0).idle_seconds != pytest.approx(0.025):
            time.sleep(0.001)
    assert job.happened.empty()
    job.store.delete_key.assert_called_with("watch/num_reporters")


def test_the_time_between_two_watched_blocks_does_not_count(job):
    for _ in range(2):
        with job.ranks[0].running():
            assert job.read(0).idle_seconds == 0.0
        job.now += 2000.0


def test_a_block_that_ends_is_not_reported(job, monkeypatch):
    claimed, left, join = threading.Event(), threading.Event(), threading.Thread.join

    def add(_key: str, _number: int) -> Any:
        claimed.set()
        assert left.wait(60)
        return mock.DEFAULT

    job.store.add.side_effect = add
    monkeypatch.setattr(threading.Thread, "join", lambda thread: [left.set(), join(thread)])
    with job.ranks[0].running():
        job.now += 20.0
        assert claimed.wait(60)
    assert job.happened.empty()
    assert not job.store.check(["watch/verdict"])


def test_a_rank_whose_store_is_gone_ends_when_it_has_made_no_progress_for_longer_than_the_limit(job, capsys):
    with job.ranks[2].running():
        for call in (job.store.set, job.store.add):  # rank 0, which serves the store, has ended
            call.side_effect = RuntimeError("Connection reset by peer")
        job.now += 20.0
        reason, code = job.next(), job.next()
    assert (reason, code) == ("rank 2 has made no progress for 20 s, and rank 0 has ended", EXIT_LOST)
    assert capsys.readouterr().err == f"error: {reason}\n"
