"""A job that is started again on the same store ignores everything that an earlier start has left there."""

import os
import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel.mesh import Mesh
from parallel.store import shared_store
from parallel.world import FOREVER, StartOptions, _store_of_this_start, start_world, stop_world
from tests.ranks import MASTER_ADDRESS, run_ranks


def join(size: int, store: dist.Store) -> list[dist.Store]:
    """The store that each rank of one start gets."""
    found: list[dist.Store] = [store] * size

    def start(rank: int) -> None:
        found[rank] = _store_of_this_start(store, rank, size, 600.0)

    threads = [threading.Thread(target=start, args=(rank,), name=f"rank {rank}") for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_keys_of_a_start_that_broke_off_are_ignored():
    """Ranks that ended before they got a reply, and one that ended after its reply, before it was counted."""
    store = dist.HashStore()
    store.set("start/requests", "first-of-an-earlier-start\nsecond-of-an-earlier-start\n")
    store.set("start/replies/first-of-an-earlier-start", "7")
    join(3, store)[0].set("word", "")
    assert not join(3, store)[2].check(["word"])


class NotingStore(dist.HashStore):
    """A store that notes the threads that ask whether a key is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_by: set[str] = set()

    def check(self, keys: list[str]) -> bool:
        self.asked_by.add(threading.current_thread().name)
        return super().check(keys)


def test_only_the_first_rank_asks_the_store_again_and_again():
    store = NotingStore()
    join(4, store)
    assert store.asked_by == {"rank 0"}


def test_a_rank_that_never_joins_is_an_error_after_the_timeout():
    with pytest.raises(TimeoutError, match="rank 0 has not joined this start"):
        _store_of_this_start(dist.HashStore(), 1, 2, 0.1)
    with pytest.raises(TimeoutError, match="not all of the 1 other ranks"):
        _store_of_this_start(dist.HashStore(), 0, 2, 0.1)


def start_twice(port: int) -> tuple[bool, bool]:
    """True for each of two starts on one store, as under torchrun, if a key existed before the start set it."""
    os.environ["MASTER_PORT"] = str(port)
    found = []
    for _ in range(2):
        start_world()
        store = shared_store()
        found.append(store.check(["stop/asked"]))
        dist.barrier()
        store.set("stop/asked", "")
        dist.barrier()
        dist.destroy_process_group()
    return tuple(found)


def test_a_request_to_stop_does_not_reach_the_next_start():
    store = dist.TCPStore(MASTER_ADDRESS, 0, is_master=True, wait_for_workers=False)
    found = run_ranks(2, start_twice, store.port, init_process_group=False)
    assert found[0][1] is False
    assert found[1][1] is False


def time_limits(hang_seconds: float) -> dict[str, tuple[timedelta, float]]:
    """The time limit of the group of each axis, and the sum of an all-reduce along it."""
    start_world(StartOptions(hang_seconds=hang_seconds))
    found = {}
    data = Mesh.create(tensor_size=1, shard_size=2).data
    for axis in (Mesh.create(tensor_size=2).tensor, data, *data.parts):
        one = torch.ones(1)
        axis.all_reduce(one, out=one).wait()
        limit = axis.group._get_backend(torch.device("cpu")).options._timeout if axis.group else None
        found[axis.name] = limit, one.item()
    dist.destroy_process_group()
    return found


def test_collectives_of_every_axis_fail_long_after_the_watchdog_has_named_a_rank():
    for hang_seconds, limit in [(700.0, timedelta(seconds=2100)), (2.0, timedelta(seconds=600)), (0.0, FOREVER)]:
        for found in run_ranks(4, time_limits, hang_seconds, init_process_group=False):
            assert found == {"tensor": (limit, 2), "data": (limit, 4), "shard": (limit, 2), "replica": (limit, 2)}


def leave_first(numel: int) -> bool:
    """Leave with a message under way, or receive it; True if this rank has received, or has left after it was."""
    world = start_world()
    data, store = Mesh.create(tensor_size=1).data, shared_store()
    if not world.is_first:
        store.wait(["the first one leaves"])
    sent = torch.ones(numel)
    out = torch.empty(2 * numel)
    gather = data.all_gather(sent, out=out)
    if not world.is_first:
        gather.wait()
        store.set("received", "")
        stop_world()
        return bool(out.eq(1).all())
    destroy, found = dist.destroy_process_group, []

    def destroy_and_look() -> None:
        found.append(store.check(["received"]))
        destroy()

    with mock.patch.object(dist, "destroy_process_group", destroy_and_look):
        store.set("the first one leaves", "")
        stop_world()
    return found == [True]


def test_a_rank_that_leaves_waits_until_others_have_received_its_messages():
    assert run_ranks(2, leave_first, 2**24, init_process_group=False) == [True, True]
