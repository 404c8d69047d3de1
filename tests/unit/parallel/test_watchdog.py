"""The rank for which the others wait is found from the heartbeats."""

import os
import threading
from dataclasses import replace

import torch
import torch.distributed as dist

from parallel.instruments.comm_log import CommLog
from parallel.watchdog import EXIT_CODE, Heartbeat, Watchdog, describe_hang

WAITING = Heartbeat(
    tick=40, idle_seconds=30.0, num_collectives=100, last="all_reduce of 8 bytes along the data axis in update"
)
BEFORE = dict.fromkeys(range(4), WAITING)
AFTER = dict.fromkeys(range(4), replace(WAITING, tick=43))


def verdict(**changed: Heartbeat | None) -> str | None:
    after = AFTER | {int(rank.removeprefix("rank_")): heartbeat for rank, heartbeat in changed.items()}
    return describe_hang(BEFORE, {rank: heartbeat for rank, heartbeat in after.items() if heartbeat}, 20.0, 4)


def test_a_rank_with_fewer_collectives_than_the_others_is_named():
    found = verdict(
        rank_2=replace(AFTER[2], num_collectives=99, last="all_gather of 64 bytes along the data axis in forward")
    )
    assert found.startswith("rank 2 has made no progress for 20 s; its last collective: all_gather of 64 bytes")
    assert "number 99" in found
    assert "rank 1" not in found


def test_a_rank_without_new_heartbeats_is_named():
    assert verdict(rank_3=WAITING).startswith(
        f"rank 3 does not answer; its last collective: {WAITING.last}, number 100"
    )
    assert verdict(rank_0=None).startswith("rank 0 does not answer; its last collective: unknown")


def test_no_rank_is_named_while_any_makes_progress():
    assert verdict(rank_1=replace(AFTER[1], idle_seconds=1.0, num_collectives=1)) is None


def test_ranks_that_are_alike_are_all_named_in_one_line():
    found = verdict()
    assert all(f"rank {rank} has made no progress" in found for rank in range(4))
    assert "\n" not in found


def test_the_log_knows_its_last_collective():
    log = CommLog()
    with log.during("forward"):
        log.record("all_gather", "data", 4, torch.zeros(1000))
    assert (log.num_recorded, str(log.last)) == (1, "all_gather of 4,000 bytes along the data axis in forward")


def test_the_reason_is_reported_before_the_process_ends(monkeypatch):
    reported, has_ended = [], threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (reported.append(code), has_ended.set()))
    with Watchdog(dist.HashStore(), 0, 1, CommLog(), hang_seconds=0.3, on_abort=reported.append).running():
        assert has_ended.wait(30)
    assert reported[0].startswith("rank 0 has made no progress for 0.3 s; its last collective: none")
    assert reported[1] == EXIT_CODE
