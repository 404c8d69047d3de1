"""Ranks that take different branches where parameters are partitioned: an error that names them, never a hang."""

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
    """Runs the blocks that it is told to, all of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        for index in route:
            x = self.blocks[index](x).tanh()
        return x.sum()


def follow(routes: list[list[list[int]]], seconds: float) -> str:
    """Train along routes[step][rank]; what the rank says in the end."""
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
    said = run_ranks(2, follow, [ALL] * num_same_steps + [routes], 2.0, init_process_group=False)
    named = [text for text in said if text.startswith("ranks took different branches of the model: ")]
    assert named
    for text in named:
        assert re.search(r"data rank \d (gathers|reduces|begins).* then (gathers|reduces|begins)", text)
        assert text.endswith("a zero.stage below 3")


def test_other_routes_on_all_ranks_are_fine():
    routes = [ALL, ALL, [[0, 2]], [[3, 1, 0, 1]], [[3, 1, 0, 1]], [[2]], ALL, ALL]
    assert run_ranks(2, follow, routes, 60.0, init_process_group=False) == ["", ""]


def exchanged_after_the_first_steps() -> int:
    mesh = Mesh.create(tensor_size=1)
    mesh.log.keeps_events = True
    model = ZeroDataParallel(Branches(), mesh.data, STAGE_3)
    for step in range(5):
        if step == 3:
            mesh.log.clear()
        model(torch.ones(1, 16), ALL[0]).backward()
        model.reducer.clear()
    return sum(event.phase == "agreement" for event in mesh.log.events)


def test_a_known_order_costs_nothing():
    assert run_ranks(2, exchanged_after_the_first_steps) == [0, 0]


def wait_in_turn(purposes: list[list[str]]) -> list[str]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    axis = Mesh.create(tensor_size=1).data
    barrier, said = HostBarrier(axis), []
    for purpose in purposes[axis.rank]:
        try:
            barrier.wait(purpose)
        except BrokenBarrier as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_ranks_with_another_purpose_or_missing_ones_are_named():
    run_ranks(3, dist.get_rank)  # starts the workers, which may take longer than the timeout
    said = run_ranks(3, wait_in_turn, [["eats"] * 2, ["eats"] * 2, ["eats", "sleeps"]], init_process_group=False)
    assert all(len(texts) == 1 and "sleeps" in texts[0] and "eats" in texts[0] for texts in said)
    said = run_ranks(2, wait_in_turn, [["eats"], []], init_process_group=False)
    assert said == [["data rank 0 eats, and of 2 ranks 1 did so within 1.5 s"], []]
