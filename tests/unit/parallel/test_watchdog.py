"""The rank for which the others wait is found from the heartbeats."""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel import comm_log, watchdog
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


def test_the_log_knows_its_last_collective():
    log = CommLog()
    with log.during("forward"):
        log.record("all_gather", "data", 4, torch.zeros(1000))
    assert log.num_recorded == 1
    assert str(log.last).startswith("all_gather of 4,000 bytes along the data axis in forward at ")


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


def test_a_rank_makes_progress_when_its_device_does_and_not_when_its_host_launches():
    log = CommLog()
    watchdog = Watchdog(dist.HashStore(), 0, 1, log, hang_seconds=1000.0)
    log.follow(torch.device("cpu"))
    times = []
    for act in (lambda: None, lambda: log.record("gather", "data", 4, torch.zeros(1)), watchdog.beat, lambda: None):
        act()
        watchdog._idle_seconds()
        times.append(watchdog._progress_time)
    assert times[0] < times[1] < times[2] == times[3]


def test_the_reason_is_reported_before_the_process_ends(monkeypatch):
    reported, has_ended = [], threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (reported.append(code), has_ended.set()))
    with Watchdog(dist.HashStore(), 0, 1, CommLog(), hang_seconds=0.3, on_abort=reported.append).running():
        assert has_ended.wait(30)
    assert reported[0].startswith("rank 0 has made no progress for 0.3 s: 0 of its 0 collectives are complete")
    assert reported[1] == EXIT_CODE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the process would have ended
def test_no_rank_ends_before_all_have_reported(monkeypatch):
    """The launcher kills all ranks when the first one ends. A report that fails, as on a full disk, counts too."""
    store, happened, have_ended = dist.HashStore(), [], threading.Barrier(3)

    def end(code: int) -> None:
        happened.append("end")
        have_ended.wait(30)

    monkeypatch.setattr(os, "_exit", end)

    def report(reason: str) -> None:
        happened.append("report")
        if len(happened) == 1:
            raise OSError("No space left on device")

    ranks = [Watchdog(store, rank, 2, CommLog(), hang_seconds=0.5, on_abort=report) for rank in range(2)]
    with ranks[0].running(), ranks[1].running():
        have_ended.wait(30)
    assert happened[:4] == ["report", "report", "end", "end"]


class Polls(threading.Event):
    """The end of a watched block, which comes after some polls; at each one `act` is called."""

    def __init__(self, act: Callable[[], None], num_polls: int = 10) -> None:
        super().__init__()
        self.act, self.seconds, self.num_polls = act, [], num_polls

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        self.act()
        return len(self.seconds) > self.num_polls


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time of the watchdog, in seconds."""
    time = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: time[0])
    return time


def test_a_rank_that_finds_another_one_at_work_reports_again_after_half_of_the_time(now):
    store = dist.HashStore()
    first, second = (Watchdog(store, rank, 2, CommLog(), hang_seconds=1000.0) for rank in range(2))
    for one in (first, second):
        one._write_heartbeat()
    now[0] += 2000.0
    store.add("watch/num_reporters", 1)
    polls = Polls(lambda: (second.beat(), second._write_heartbeat()))
    first._report(polls)
    assert polls.seconds == [100.0] * 3
    assert not store.check(["watch/verdict"])
    assert store.add("watch/num_reporters", 1) == 1, "any rank may report again"
    assert first._idle_seconds() == 500.0


@pytest.mark.parametrize(("has_another", "reported"), [(False, [15.0, 20.0]), (True, [])])
def test_one_rank_reports_when_it_has_made_no_progress_for_longer_than_the_limit(
    now, monkeypatch, has_another, reported
):
    store, times = dist.HashStore(), []
    one = Watchdog(store, 0, 2, CommLog(), hang_seconds=10.0)
    one._idle_seconds()

    def report(_ended: threading.Event) -> None:
        times.append(now[0] - 100.0)
        store.delete_key("watch/num_reporters")

    def poll() -> None:
        now[0] += 5.0

    monkeypatch.setattr(one, "_report", report)
    if has_another:
        store.add("watch/num_reporters", 1)
    polls = Polls(poll, num_polls=4)
    one._watch(polls)
    assert polls.seconds == [1.0] * 5
    assert times == reported


def test_a_rank_whose_store_is_gone_ends_when_it_has_made_no_progress_for_longer_than_the_limit(now, monkeypatch):
    ended = []
    one = Watchdog(StoreOfRank0(), 3, 4, CommLog(), hang_seconds=10.0)
    one._write_heartbeat()
    monkeypatch.setattr(one, "_print_and_end", lambda verdict: ended.append((now[0] - 100.0, verdict)))

    def poll() -> None:
        now[0] += 5.0

    one._watch(Polls(poll, num_polls=3))
    reason = "rank 3 has made no progress for 15 s, and rank 0 has ended"
    assert ended == [(15.0, watchdog.Verdict(reason, num_alive=1))]


def test_the_time_between_two_watched_blocks_does_not_count(now):
    store = dist.HashStore()
    one = Watchdog(store, 0, 1, CommLog(), hang_seconds=1000.0)
    for _ in range(2):
        with one.running():
            assert json.loads(store.get("watch/0"))["idle_seconds"] == 0.0
        now[0] += 2000.0


def test_a_block_that_ends_is_not_reported(now):
    store, ended = dist.HashStore(), threading.Event()
    one = Watchdog(store, 0, 1, CommLog(), hang_seconds=10.0)
    now[0] += 2000.0
    ended.set()
    one._report(ended)
    assert not store.check(["watch/verdict"])


def test_ranks_whose_processes_have_ended_are_not_waited_for(now, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(watchdog, "SECONDS_TO_REPORT", 0.1)
    store = dist.HashStore()
    ranks = [Watchdog(store, rank, 4, CommLog(), hang_seconds=10.0) for rank in range(3)]
    for one in ranks:
        one._write_heartbeat()
    now[0] += 2000.0
    store.add("watch/num_reported", 1)  # by rank 1
    ranks[0]._report(Polls(ranks[1]._write_heartbeat))  # rank 2 writes no more, and rank 3 never has
    found = json.loads(store.get("watch/verdict"))
    assert found["reason"].startswith("rank 2 does not answer: 0 of its 0 ")
    assert "; rank 3 does not answer: its collectives are unknown; the job" in found["reason"]
    assert found["num_alive"] == 2
    assert store.check(["watch/all_reported"])


class StoreOfRank0:
    """A store that raises errors after its first value: rank 0, which serves it, has ended."""

    def __init__(self) -> None:
        self.num_calls = 0

    def set(self, _key: str, _value: str) -> None:
        self.num_calls += 1
        if self.num_calls > 1:
            raise RuntimeError("Connection reset by peer")

    def add(self, _key: str, _number: int) -> int:
        raise RuntimeError("Connection reset by peer")


# Without the end of the process, the store's error ends the thread.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_waits_for_ranks_whose_store_has_ended_ends_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    codes, reasons, has_ended = [], [], threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), has_ended.set()))
    watchdog = Watchdog(StoreOfRank0(), 3, 4, CommLog(), hang_seconds=0.2, on_abort=reasons.append)
    with watchdog.running():
        assert has_ended.wait(30)
    assert set(codes) == {EXIT_CODE}
    assert reasons[0].startswith("rank 3 has made no progress for 0 s, and rank 0 has ended")
    assert capsys.readouterr().err.startswith(f"error: {reasons[0]}\n")
