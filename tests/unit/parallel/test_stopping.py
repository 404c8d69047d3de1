"""Ranks, here threads with one store, agree on their last step, whatever step each is in when it is asked."""

import itertools
import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from parallel import stopping
from parallel.process_defaults import raise_file_limit
from parallel.stopping import Stopping
from tests.programs import start_forked, wait_for_end

LIMIT_SECONDS = 60  # after which a hang ends


def test_all_ranks_stop_after_the_same_step():
    """A step ends when all ranks have begun it, as with any collective: a rank that left early would hang the rest."""
    size, store, chooser = 4, dist.HashStore(), random.Random(0)
    begun, all_begun = [0] * size, threading.Condition()
    stops = [Stopping(store, rank, size) for rank in range(size)]
    pauses = [[chooser.random() * 0.01 for _ in range(100)] for _ in range(size)]

    def train(rank: int) -> None:
        for step in itertools.count(1):
            time.sleep(pauses[rank][step % 100])
            if not stops[rank].may_begin(step):
                return
            with all_begun:
                begun[rank] = step
                all_begun.notify_all()
                assert all_begun.wait_for(lambda step=step: min(begun) >= step, timeout=LIMIT_SECONDS)
            if rank == 2 and step == 20:
                stops[rank].request()

    def watch(rank: int) -> None:
        while not done.wait(pauses[rank][0]):
            stops[rank].agree()

    done = threading.Event()
    trainers = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(size)]
    watchers = [threading.Thread(target=watch, args=(rank,)) for rank in range(size)]
    for thread in trainers + watchers:
        thread.start()
    for thread in trainers:
        thread.join(LIMIT_SECONDS)
    done.set()
    assert not any(thread.is_alive() for thread in trainers)
    assert len(set(begun)) == 1
    assert begun[0] >= 20


def test_ranks_that_have_rolled_back_stop_after_the_step_that_they_have_begun():
    stops = [Stopping(store, rank, 2) for store in [dist.HashStore()] for rank in range(2)]
    for step in (8, 9, 10, 3):  # the run goes on behind the checkpoint of step 2
        assert [stop.may_begin(step) for stop in stops] == [True, True]
    assert stops[0].may_begin(4)
    stops[0].request()
    for stop in (*stops, *stops):
        stop.agree()
    assert [stops[1].may_begin(4), *(stop.may_begin(5) for stop in stops)] == [True, False, False]


def test_ranks_agree_on_a_step_to_save_after_when_the_last_save_was_long_ago():
    now, store = [0.0], dist.HashStore()
    stops = [Stopping(store, rank, 2, clock=lambda: now[0], save_seconds=60) for rank in range(2)]

    def due(step: int, seconds: float, *, begun_by: int = 2) -> list[bool]:
        """Return whether a save is due after a step, during which the ranks poll; only some may have begun it then."""
        now[0] = seconds
        assert all(stop.may_begin(step) for stop in stops[:begun_by])
        for stop in (*stops, *stops):
            stop.agree()
        assert all(stop.may_begin(step) for stop in stops[begun_by:])
        return [stop.is_save_due() for stop in stops]

    assert due(1, 59) == [False, False]
    assert due(2, 60, begun_by=1) == [False, False]
    assert due(3, 61) == [True, True]
    assert [stop.is_save_due() for stop in stops] == [False, False]
    assert due(4, 120) == [False, False]
    for stop in stops:
        stop.saved()  # for another reason
    assert due(5, 179) == [False, False]
    assert due(6, 180) == [False, False]
    assert due(7, 180) == [True, True]


@pytest.mark.parametrize(("number", "num_open"), [(signal.SIGTERM, 0), (signal.SIGINT, 1024)])
def test_a_signal_asks_to_stop_and_its_handler_is_restored_after_the_block(number, num_open):
    raise_file_limit()
    open_files = [os.dup(0) for _ in range(num_open)]  # such as those of a blend of many corpora
    before, threads, files = signal.getsignal(number), set(threading.enumerate()), os.listdir("/proc/self/fd")
    store = dist.HashStore()
    stop, peer = (Stopping(store, rank, 2, clock=lambda: 0.0) for rank in range(2))
    with stop.handling_signals():
        assert {thread.daemon for thread in set(threading.enumerate()) - threads} == {True}
        assert stop.may_begin(1)
        os.kill(os.getpid(), number)
        store.wait(["stop/step/0"], timedelta(seconds=LIMIT_SECONDS))
        os.kill(os.getpid(), number)  # as a launcher passes it on
        peer.agree()
        assert not stop.may_begin(2)
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1
    assert set(threading.enumerate()) <= threads
    assert os.listdir("/proc/self/fd") == files
    for descriptor in open_files:
        os.close(descriptor)


def test_a_store_that_fails_is_asked_again_after_a_pause(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(stopping.time, "sleep", pauses.append)
    stop = Stopping(dist.HashStore(), 0, 1)
    stopping.attempt(stop.request)
    assert pauses == []
    for error in (dist.DistStoreError("gone"), ValueError("not an integer")):
        stopping.attempt(mock.Mock(side_effect=error))
    assert pauses == [stopping.POLL_SECONDS] * 2


def test_ctrl_c_stays_ignored_in_a_job_that_a_shell_started_in_the_background():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stopping(dist.HashStore(), 0, 1).handling_signals():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for_ever(store_is_gone: bool, seconds_later: float, is_sent_again: bool) -> None:
    """Ask a rank whose peer never answers to stop, and let time pass."""
    now, is_asked = [0.0], threading.Event()

    def clock() -> float:
        time = now[0]
        is_asked.set()
        return time

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port) if store_is_gone else dist.HashStore()
    del server
    stop = Stopping(store, 0, 2, lambda reason: os.write(1, f"told: {reason}".encode()), clock)
    with stop.handling_signals():
        stop.may_begin(1)
        os.kill(os.getpid(), signal.SIGINT)
        is_asked.wait() if store_is_gone else store.wait(["stop/step/0"])
        now[0] = seconds_later
        if is_sent_again:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1000)


@pytest.mark.parametrize(
    ("case", "code"),
    [((False, 11, False), 1), ((True, 11, False), 1), ((False, 3, True), 128 + signal.SIGINT)],
    ids=["a peer is gone", "the launcher is gone with its store", "a second signal comes"],
)
def test_a_rank_that_cannot_stop_in_order_ends_wherever_it_waits(tmp_path: Path, case, code):
    assert wait_for_end(start_forked(tmp_path / "said", wait_for_ever, *case)) == code
    told = "told: rank 0 was asked to stop in step 1, and not all 2 ranks have answered within 10 s"
    assert (told in (tmp_path / "said").read_text()) == (code == 1)
