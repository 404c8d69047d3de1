"""The pool of ranks itself: a harness that loses results, errors or hangs would make every other test worthless."""

import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import RankCall, RankError, RankPool, Worker, answer, collect, run_ranks


@pytest.fixture
def own_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    """Workers that a test may end. All of them are forked: one that is spawned imports everything anew."""
    pool, start_worker = RankPool(), ranks.start_worker
    monkeypatch.setattr(ranks, "rank_pool", lambda: pool)
    monkeypatch.setattr(ranks, "start_worker", lambda _rank: start_worker(1))
    yield pool
    pool.stop()


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def process_id() -> int:
    return os.getpid()


def fail_on_rank_1_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("num_heads=12 is not divisible by 8")
    dist.barrier()


def hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(3600)
    dist.destroy_process_group()


def return_a_lambda() -> object:
    return lambda: None


def random_number() -> float:
    return torch.rand(()).item()


def leave_float64_as_default() -> None:
    torch.set_default_dtype(torch.float64)


def default_dtype() -> torch.dtype:
    return torch.get_default_dtype()


def test_workers_are_reused_and_are_other_processes():
    first, second = run_ranks(2, process_id), run_ranks(2, process_id)
    assert first == second
    assert len({os.getpid(), *first}) == 3


def test_every_call_starts_from_the_same_state():
    run_ranks(1, leave_float64_as_default)
    assert run_ranks(1, default_dtype) == [torch.float32]
    assert run_ranks(2, random_number) == run_ranks(1, random_number) * 2


def test_an_exception_is_reported_with_its_traceback_and_the_next_call_works(own_pool, monkeypatch):
    monkeypatch.setattr(ranks, "LATE_DEATH_SECONDS", 0.0)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 raised.*in fail_on_rank_1.*num_heads=12 is not divisible"):
        run_ranks(2, fail_on_rank_1_while_others_wait)
    assert run_ranks(2, sum_of_ranks) == [1.0, 1.0]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_death_is_reported_before_the_errors_that_it_causes(monkeypatch, is_late):
    """Imitate a survivor that has answered before this process looks at either, or before it can see the death."""
    connections, of_workers = zip(*[multiprocessing.Pipe() for _ in range(2)], strict=True)
    of_workers[0].send_bytes(pickle.dumps((False, "connection closed by peer")))
    if not is_late:
        of_workers[1].close()

    def wait_and_die(*arguments: Any) -> list[Any]:
        answered = wait(*arguments)
        of_workers[1].close()
        return answered

    monkeypatch.setattr(ranks, "wait", wait_and_die)
    ended = mock.Mock(exitcode=3)
    with pytest.raises(RankError, match="rank 1 of 2 died with exit code 3"):
        collect([Worker(ended, connection) for connection in connections], timeout_seconds=60)


def test_a_hang_ends_at_the_timeout(own_pool, monkeypatch):
    """The time is over as soon as only the rank that hangs has not answered."""

    def wait_for_rank_1(pending: list[Any], seconds_left: float) -> list[Any]:
        assert 0.0 < seconds_left <= 300.0
        return wait(pending, seconds_left) if len(pending) == 2 else []

    monkeypatch.setattr(ranks, "wait", wait_for_rank_1)
    with pytest.raises(RankError, match=r"no answer from ranks \[0\] of 2 in 300 s"):
        run_ranks(2, hang_on_rank_0, timeout_seconds=300)
    assert own_pool.workers == []


def test_a_result_that_cannot_be_pickled_is_an_error():
    succeeded, error = pickle.loads(answer(pickle.dumps(RankCall(return_a_lambda, (), {}, {}, False))))
    assert not succeeded
    assert "lambda" in error
