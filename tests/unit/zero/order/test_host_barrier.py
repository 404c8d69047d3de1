"""A rank at a barrier on the host waits for ranks that come late, unless one has failed or the time is over."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from parallel.mesh import Axis, Mesh
from parallel.world import imitated_world
from zero.extensions import host_barrier
from zero.extensions.host_barrier import BrokenBarrier, HostBarrier


@pytest.fixture
def now() -> list[float]:
    """The time of the barriers, in seconds."""
    return [0.0]


class NotingStore(dist.HashStore):
    """A store that notes the keys that ranks look for."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_for: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.looked_for += keys
        return super().check(keys)


@pytest.fixture
def store() -> NotingStore:
    """The store of the barriers."""
    return NotingStore()


@pytest.fixture
def barriers(monkeypatch, now, store) -> list[HostBarrier]:
    """Those of two ranks, in one process."""
    made, limits = [], dict[dist.ProcessGroup, timedelta]()
    monkeypatch.setattr(host_barrier, "time_limit", limits.__getitem__)
    monkeypatch.setattr(host_barrier, "shared_store", lambda: store)
    monkeypatch.setattr(host_barrier, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(Axis, "has_peers", True)
    for rank in range(2):
        with imitated_world(rank, 2, local_size=2, backend="gloo"):
            data = Mesh.create(tensor_size=1).data
            limits[data.group] = timedelta(seconds=200)
            made.append(HostBarrier(data, clock=lambda: now[0]))
    return made


def on_poll(monkeypatch, act: Callable[[int], bool]) -> None:
    """Call `act` with the number of the poll when a rank asks whether another one has failed."""
    polls: list[None] = []

    def poll() -> bool:
        polls.append(None)
        assert len(polls) < 10, "the barrier does not end"
        return act(len(polls))

    monkeypatch.setattr(host_barrier, "has_failed_elsewhere", poll)


def test_a_rank_that_comes_late_is_waited_for_at_each_use(barriers, monkeypatch):
    came = []

    def come(poll: int) -> bool:
        if poll in (3, 5):
            came.append(poll)
            barriers[1].wait("eats")
        return False

    on_poll(monkeypatch, come)
    for num_uses in (1, 2):
        barriers[0].wait("eats")
        assert len(came) == num_uses


def test_a_rank_that_has_failed_is_not_waited_for(barriers, monkeypatch):
    on_poll(monkeypatch, lambda poll: poll == 3)
    with pytest.raises(BrokenBarrier, match=r"^data rank 0 eats, and another rank has failed$"):
        barriers[0].wait("eats")


def test_a_rank_that_tells_that_it_has_gone_on_is_not_waited_for(barriers, monkeypatch):
    on_poll(monkeypatch, lambda poll: bool(barriers[1].tell(poll, f"sleeps {poll} hours")))
    with pytest.raises(BrokenBarrier, match=r"^data rank 0 eats, data rank 1 sleeps [3-9] hours$"):
        barriers[0].wait("eats", 3)


def test_the_keys_of_ranks_are_looked_at_only_after_one_of_them_has_told_something(barriers, monkeypatch, store):
    def act(poll: int) -> bool:
        if poll == 3:
            barriers[1].tell(1, "rests")
        elif poll == 6:
            barriers[1].wait("eats")
        return False

    on_poll(monkeypatch, act)
    barriers[0].wait("eats", 3)
    looked_for = [key.rpartition("/gone/")[2] for key in store.looked_for if "/gone/" in key]
    assert looked_for == ["0", "1"]


def test_half_of_a_collectives_time_is_waited_for_other_ranks_with_one_warning(barriers, monkeypatch, now, caplog):
    times = []

    def pass_time(_poll: int) -> bool:
        now[0] += 40.0
        times.append(now[0])
        return False

    on_poll(monkeypatch, pass_time)
    with pytest.raises(BrokenBarrier, match=r"^data rank 0 eats, and of 2 ranks 1 did so within 100 s$"):
        barriers[0].wait("eats")
    assert times == [40.0, 80.0, 120.0]
    assert caplog.messages == [
        "data rank 0 eats, and of 2 ranks 1 did so within 40 s; it waits for the others, at most 100 s"
    ]


def test_the_rank_with_another_purpose_is_named_on_all(barriers, monkeypatch):
    said = []

    def come(_poll: int) -> bool:
        with pytest.raises(BrokenBarrier) as raised:
            barriers[1].wait("sleeps")
        said.append(str(raised.value))
        return False

    on_poll(monkeypatch, come)
    with pytest.raises(BrokenBarrier, match=r"^data rank 0 eats, data rank 1 sleeps$"):
        barriers[0].wait("eats")
    assert said == ["data rank 1 sleeps, another rank eats"]
