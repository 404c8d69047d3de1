"""The order in which the ranks of 2 x 2 x 2 (replica, shard, tensor) launch collectives, and which are exposed."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from gpt.build import build, build_mesh
from gpt.planner.dry_run import blank_micro_batches
from gpt.settings import Settings
from gpt.train_step import train_step
from parallel.instruments.fake_tensors import QuickFakeTensorMode
from parallel.instruments.launch_order import Job, Launch, exposed
from parallel.instruments.stream_checker import StreamChecker
from parallel.world import imitated_world
from tests.distributed.gpt.test_streams import FACTORS, settings_of

NUM_RANKS = 8
# {name: (values of FACTORS, {(axis, operation): (exposed, all) collectives of a step})}, without the tensor axis
SETTINGS = {
    "stage 1": (
        (1, (4, None, 2), 1, "reduce", "none", "none", "bf16", ""),
        {("data", "reduce_scatter"): (0, 4), ("data", "all_gather"): (1, 4)},
    ),
    "stage 1, shard groups, accumulated locally": (
        (1, (4, 2, 2), 2, "local", "none", "none", "bf16", ""),
        {("shard", "reduce_scatter"): (0, 4), ("replica", "all_reduce"): (4, 4), ("shard", "all_gather"): (1, 4)},
    ),
    "stage 2": (
        (2, (4, None, 2), 1, "reduce", "none", "none", "bf16", ""),
        {("data", "reduce_scatter"): (0, 4), ("data", "all_gather"): (1, 4)},
    ),
    "stage 2, shard groups, reduced each time": (
        (2, (4, 2, 2), 2, "reduce", "partition", "none", "bf16", ""),
        {("shard", "reduce_scatter"): (0, 8), ("replica", "all_reduce"): (8, 8), ("shard", "all_gather"): (1, 4)},
    ),
    "stage 3": (
        (3, (4, None, 2), 1, "reduce", "none", "none", "bf16", ""),
        {("data", "reduce_scatter"): (0, 5), ("data", "all_gather"): (1, 7)},
    ),
    "stage 3, shard groups, reduced each time": (
        (3, (4, 2, 2), 2, "reduce", "none", "none", "bf16", ""),
        {("shard", "reduce_scatter"): (0, 10), ("replica", "all_reduce"): (10, 10), ("shard", "all_gather"): (2, 14)},
    ),
    "stage 3, shard groups, accumulated locally, on the host": (
        (3, (4, 2, 2), 2, "local", "partition_host", "host", "bf16", ""),
        {("shard", "reduce_scatter"): (0, 5), ("replica", "all_reduce"): (5, 5), ("shard", "all_gather"): (2, 14)},
    ),
}
BY_DEFAULT = {"stage 2, shard groups, reduced each time", "stage 3, shard groups, accumulated locally, on the host"}


def launches_of(settings: Settings, rank: int, tensor_mode: QuickFakeTensorMode) -> tuple[list[Launch], int]:
    """Return the launches of a rank that builds a run and trains two steps, and the number of those before the last."""
    with imitated_world(rank, NUM_RANKS, NUM_RANKS, "nccl") as world:
        mesh = build_mesh(settings, world)
        with tensor_mode, StreamChecker(world.device) as checker:
            checker.record_launches()
            state = build(settings, mesh, world.device)
            micro_batches = blank_micro_batches(settings.train, settings.model.seq_length, mesh.data.size)
            train_step(state.model, state.optimizer, micro_batches, mesh)
            num_before = len(checker.launches)
            train_step(state.model, state.optimizer, micro_batches, mesh)
        return checker.launches, num_before


def collectives_by_communicator(launches: list[Launch]) -> dict[tuple, list[tuple]]:
    found = defaultdict(list)
    for launch in launches:
        if launch.is_collective:
            found[launch.stream, launch.ranks].append(launch.message)
    return found


def check(name: str) -> None:
    values, expected = SETTINGS[name]
    settings = settings_of(dict(zip(FACTORS, values, strict=True)))
    settings = replace(settings, model=replace(settings.model, num_layers=2))
    tensor_mode = QuickFakeTensorMode()  # all ranks share its cache
    launches, firsts = zip(*(launches_of(settings, rank, tensor_mode) for rank in range(NUM_RANKS)), strict=True)

    by_rank = [collectives_by_communicator(of_rank) for of_rank in launches]
    for found in by_rank:
        for communicator, messages in found.items():
            assert all(by_rank[member][communicator] == messages for member in communicator[1])
    assert Job(launches).run() == []

    of_step, exposed_of_step = Counter(), Counter()
    for counter, collectives in (
        (of_step, [launch for launch in launches[0][firsts[0] :] if launch.is_collective]),
        (exposed_of_step, exposed(launches[0], firsts[0])),
    ):
        for launch in collectives:
            axis = launch.stream.removeprefix("the communicator ")
            if axis != "tensor" and launch.num_bytes > 8:  # the rest: the norm
                counter[axis, launch.name] += 1
    assert {key: (exposed_of_step[key], number) for key, number in of_step.items()} == expected


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.full) for name in SETTINGS]
)
def test_ranks_launch_the_same_collectives_cannot_hang_and_expose_few(name):
    check(name)
