"""Ranks that take different branches if parameters are partitioned: an error names the branches, and no rank hangs."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.host_barrier import BrokenBarrier, HostBarrier
from parallel.mesh import Mesh
from tests.ranks import run_ranks
from zero.config import ZeroConfig
from zero.engine import ZeroDataParallel
from zero.units.agreement import DivergedRanks

STAGE_3 = ZeroConfig(stage=3, bucket_numel=500, prefetch_numel=600)


class Branches(nn.Module):
    """Blocks of one size; forward runs those of `route`, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        for index in route:
            x = self.blocks[index](x).tanh()
        return x.sum()


def train_along(routes: list[list[list[int]]], seconds: float) -> str:
    """Train along routes[step][rank]; return the error of this rank, or an empty string."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    mesh = Mesh.create(tensor_size=1)
    model = ZeroDataParallel(Branches(), mesh.data, STAGE_3)
    try:
        for step in routes:
            model(torch.ones(1, 16), step[mesh.data.rank % len(step)]).backward()
            model.reducer.clear()
    except DivergedRanks as error:
        return str(error)
    except RuntimeError as error:
        return f"a collective: {error}"
    return ""


ALL = [[0, 1, 2, 3]]


@pytest.mark.parametrize("num_same_steps", [0, 4])
@pytest.mark.parametrize(
    "routes",
    [
        [[0, 1, 2, 3], [0, 2, 1, 3]],
        [[0, 1, 2, 3], [0, 1, 2]],
        [[0, 1, 2], [0, 1, 2, 3]],
        [[3, 2], [2, 3]],
        [[0, 1, 2, 3], [0, 1, 1, 2, 3]],
    ],
)
def test_different_branches_are_named(num_same_steps, routes):
    messages = run_ranks(2, train_along, [ALL] * num_same_steps + [routes], 2.0, init_process_group=False)
    named = [text for text in messages if text.startswith("ranks took different branches of the model: ")]
    assert named
    for text in named:
        assert re.search(r"data rank \d (gathers|reduces|begins).* then (gathers|reduces|begins)", text)
        assert text.endswith("a ZeroConfig.stage below 3")


def test_all_ranks_may_change_their_route_together():
    routes = [ALL, ALL, [[0, 2]], [[3, 1, 0, 1]], [[3, 1, 0, 1]], [[2]], ALL, ALL]
    assert run_ranks(2, train_along, routes, 60.0, init_process_group=False) == ["", ""]


def num_comparisons_after_the_first_steps() -> int:
    """Return how often ranks compared their launches after the third step."""
    mesh = Mesh.create(tensor_size=1)
    mesh.log.keeps_events = True
    model = ZeroDataParallel(Branches(), mesh.data, STAGE_3)
    for step in range(5):
        if step == 3:
            mesh.log.clear()
        model(torch.ones(1, 16), ALL[0]).backward()
        model.reducer.clear()
    return sum(event.phase == "agreement" for event in mesh.log.events)


def test_an_execution_order_that_repeats_is_not_compared():
    assert run_ranks(2, num_comparisons_after_the_first_steps) == [0, 0]


def wait_for_each(purposes: list[list[str]]) -> list[str]:
    """Wait at a barrier once for each purpose of this rank; return the errors."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    axis = Mesh.create(tensor_size=1).data
    barrier, messages = HostBarrier(axis), []
    for purpose in purposes[axis.rank]:
        try:
            barrier.wait(purpose)
        except BrokenBarrier as error:
            messages.append(str(error))
    dist.barrier()
    return messages


def test_ranks_with_another_purpose_or_missing_ones_are_named():
    run_ranks(3, dist.get_rank)  # starts the workers, which may take longer than the timeout
    messages = run_ranks(3, wait_for_each, [["eats"] * 2, ["eats"] * 2, ["eats", "sleeps"]], init_process_group=False)
    assert all(len(texts) == 1 and "sleeps" in texts[0] and "eats" in texts[0] for texts in messages)
    messages = run_ranks(2, wait_for_each, [["eats"], []], init_process_group=False)
    assert messages == [["data rank 0 eats, and of 2 ranks 1 did so within 1.5 s"], []]
