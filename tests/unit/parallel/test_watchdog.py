"""The rank for which the others wait is found from the heartbeats."""

import json
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel import comm_log
from parallel.comm_log import CommLog
from parallel.watchdog import EXIT_CODE, Heartbeat, Watchdog, describe_hang

WAITING = Heartbeat(
    tick=40,
    idle_seconds=30.0,
    num_launched=100,
    num_reached=100,
    num_complete=99,
    next="all_reduce of 8 bytes along the data axis in update",
)
BEFORE = dict.fromkeys(range(4), WAITING)
AFTER = dict.fromkeys(range(4), replace(WAITING, tick=43))


def verdict(**changed: Heartbeat | None) -> str | None:
    after = AFTER | {int(rank.removeprefix("rank_")): heartbeat for rank, heartbeat in changed.items()}
    return describe_hang(BEFORE, {rank: heartbeat for rank, heartbeat in after.items() if heartbeat}, 20.0, 4)


def test_a_rank_whose_host_has_launched_fewer_collectives_than_the_others_is_named():
    found = verdict(
        rank_2=replace(
            AFTER[2], num_launched=99, num_reached=99, next="all_gather of 64 bytes along the data axis in forward"
        )
    )
    assert found.startswith(
        "rank 2 has made no progress for 20 s: 99 of its 99 collectives are complete, the last one is all_gather of 64"
    )
    assert "rank 1" not in found


def test_a_rank_whose_device_hangs_is_named_though_its_host_has_launched_most():
    """The hosts of ranks that wait have launched what they could; that of rank 3 was the fastest."""
    found = verdict(
        rank_1=replace(AFTER[1], num_launched=101), rank_3=replace(AFTER[3], num_launched=150, num_reached=99)
    )
    assert found.startswith("rank 3 has made no progress for 20 s: 99 of its 150 collectives are complete, the next")
    assert "rank 1" not in found
    found = verdict(rank_1=replace(AFTER[1], num_launched=80, num_reached=80, num_complete=80))
    assert found.startswith("rank 1 has")
    assert "rank 3" not in found


def test_a_rank_without_new_heartbeats_is_named():
    assert verdict(rank_3=WAITING).startswith(
        f"rank 3 does not answer: 99 of its 100 collectives are complete, the next one is {WAITING.next}; the job ends"
    )
    assert verdict(rank_0=None).startswith("rank 0 does not answer: its collectives are unknown")


def test_no_rank_is_named_while_any_makes_progress():
    assert verdict(rank_1=replace(AFTER[1], idle_seconds=1.0, num_complete=1)) is None
    assert verdict(rank_1=replace(AFTER[1], idle_seconds=9.9)) is None
    assert verdict(rank_1=replace(AFTER[1], idle_seconds=10.0))


def test_ranks_that_are_alike_are_named_in_one_line():
    found = verdict()
    assert all(f"rank {rank} has made no progress" in found for rank in range(4))
    assert "\n" not in found
    assert "more ranks" not in found
    before, after = (dict.fromkeys(range(6), beats[0]) for beats in (BEFORE, AFTER))
    found = describe_hang(before, after, 20.0, 6)
    assert found.count("has made no progress") == 4
    assert "rank 3 has" in found
    assert found.endswith("in update; and 2 more ranks; the job ends (run.hang_seconds=20)")


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


class Clock:
    """The time of the watchdogs, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self) -> None:
        self.now += 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watchdogs(clock: Clock, store: dist.Store, size: int, **options: Any) -> list[Watchdog]:
    """Return the watchdogs of `size` ranks, each with a heartbeat."""
    found = [Watchdog(store, rank, size, CommLog(), 10.0, clock=clock, **options) for rank in range(size)]
    for one in found:
        one._write_heartbeat()
    return found


@pytest.fixture(autouse=True)
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes of ranks that have ended. Here the end of a process is that of its thread."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", end)
    return codes


class Polls(threading.Event):
    """The end of a watched block, which comes after some polls; at each one `act` is called."""

    def __init__(self, act: Callable[[], None], num_polls: int = 10) -> None:
        super().__init__()
        self.act, self.seconds, self.num_polls = act, [], num_polls

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        self.act()
        return len(self.seconds) > self.num_polls


def test_a_rank_makes_progress_when_its_device_does_and_not_when_its_host_launches(clock):
    log = CommLog()
    one = Watchdog(dist.HashStore(), 0, 1, log, 10.0, clock=clock)
    log.follow(torch.device("cpu"))
    idle_seconds = []
    for act in (lambda: None, lambda: log.record("gather", "data", 4, torch.zeros(1)), one.beat, lambda: None):
        act()
        idle_seconds.append(one._idle_seconds())
        clock.advance()
    assert idle_seconds == [0.0, 0.0, 0.0, 5.0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the end of its thread
def test_the_reason_is_reported_before_the_process_ends(codes):
    reported = queue.SimpleQueue()
    with Watchdog(dist.HashStore(), 0, 1, CommLog(), 0.3, lambda reason: reported.put((reason, *codes))).running():
        (reason,) = reported.get(timeout=60)
    assert reason.startswith("rank 0 has made no progress for 0.3 s: 0 of its 0 collectives are complete")
    assert codes == [EXIT_CODE]


def test_no_rank_ends_before_all_have_reported(clock, codes):
    """The launcher kills all ranks when the first one ends. A report that fails, as on a full disk, counts too."""
    store, happened = mock.Mock(wraps=dist.HashStore()), []

    def report_and_fail(reason: str) -> None:
        happened.append(f"{len(codes)} have ended")
        raise OSError("No space left on device")

    def end_second(*_: object) -> Any:
        """Let the second rank end when the first one waits for it."""
        if len(happened) == 1:
            with pytest.raises(SystemExit):
                second._watch(Polls(lambda: None))
        return mock.DEFAULT

    first, second = watchdogs(clock, store, 2, on_abort=report_and_fail)
    store.wait.side_effect = end_second
    clock.now += 20.0
    with pytest.raises(SystemExit):
        first._report(Polls(second._write_heartbeat))
    assert happened == ["0 have ended"] * 2
    assert codes == [EXIT_CODE] * 2


def test_a_rank_that_finds_another_one_at_work_reports_again_after_half_of_the_time(clock):
    store = dist.HashStore()
    first, second = watchdogs(clock, store, 2)
    clock.now += 20.0
    store.add("watch/num_reporters", 1)
    polls = Polls(lambda: (second.beat(), second._write_heartbeat()))
    first._report(polls)
    assert polls.seconds == [1.0] * 3
    assert not store.check(["watch/verdict"])
    assert store.add("watch/num_reporters", 1) == 1, "any rank may report again"
    assert first._idle_seconds() == 5.0


@pytest.mark.parametrize(("has_another", "reported"), [(False, [115.0, 120.0]), (True, [])])
def test_one_rank_reports_when_it_has_made_no_progress_for_longer_than_the_limit(
    clock, monkeypatch, has_another, reported
):
    store, times = dist.HashStore(), []
    one, _ = watchdogs(clock, store, 2)

    def report(_ended: threading.Event) -> None:
        times.append(clock.now)
        store.delete_key("watch/num_reporters")

    monkeypatch.setattr(one, "_report", report)
    if has_another:
        store.add("watch/num_reporters", 1)
    polls = Polls(clock.advance, num_polls=4)
    one._watch(polls)
    assert polls.seconds == [1.0] * 5
    assert times == reported


def test_the_time_between_two_watched_blocks_does_not_count(clock):
    store = dist.HashStore()
    one = Watchdog(store, 0, 1, CommLog(), hang_seconds=1000.0, clock=clock)
    for _ in range(2):
        with one.running():
            assert json.loads(store.get("watch/0"))["idle_seconds"] == 0.0
        clock.now += 2000.0


def test_a_block_that_ends_is_not_reported(clock):
    store, ended = dist.HashStore(), threading.Event()
    (one,) = watchdogs(clock, store, 1)
    clock.now += 20.0
    ended.set()
    one._report(ended)
    assert not store.check(["watch/verdict"])


def test_ranks_whose_processes_have_ended_are_not_waited_for(clock, codes):
    store = dist.HashStore()
    ranks = watchdogs(clock, store, 4)
    store.delete_key("watch/3")
    clock.now += 20.0
    store.add("watch/num_reported", 1)  # by rank 1
    with pytest.raises(SystemExit):
        ranks[0]._report(Polls(ranks[1]._write_heartbeat))  # rank 2 writes no more, and rank 3 never has
    found = json.loads(store.get("watch/verdict"))
    assert found["reason"].startswith("rank 2 does not answer: 0 of its 0 ")
    assert "; rank 3 does not answer: its collectives are unknown; the job" in found["reason"]
    assert found["num_alive"] == 2
    assert store.check(["watch/all_reported"])


def test_a_rank_whose_store_is_gone_ends_when_it_has_made_no_progress_for_longer_than_the_limit(clock, codes, capsys):
    gone = mock.Mock(side_effect=RuntimeError("Connection reset by peer"))  # rank 0, which serves the store, has ended
    reasons = []
    one = Watchdog(mock.Mock(set=gone, add=gone), 3, 4, CommLog(), 10.0, reasons.append, clock)
    with pytest.raises(SystemExit):
        one._watch(Polls(clock.advance))
    assert reasons == ["rank 3 has made no progress for 15 s, and rank 0 has ended"]
    assert codes == [EXIT_CODE]
    assert capsys.readouterr().err == f"error: {reasons[0]}\n"
