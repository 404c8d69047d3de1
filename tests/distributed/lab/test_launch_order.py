"""The order in which the ranks of 2 x 2 x 2 (replica, shard, tensor) launch collectives, and which are exposed."""

from collections import Counter, defaultdict
from dataclasses import replace
from typing import NamedTuple

import pytest

from gpt.builder.train_state import build, build_mesh
from gpt.settings.settings import Settings
from gpt.train_step import train_step
from lab.dryrun.dry_run import blank_micro_batches, dry_run
from lab.observe.fake_tensors import QuickFakeTensorMode
from lab.races.simulated_streams import COMPUTATION, SIDE_STREAM, Launch
from lab.races.stream_checker import StreamChecker
from parallel.world import imitated_world
from tests.distributed.lab.test_streams import FACTORS, settings_of
from tests.launch_order import Job, waiting_time
from zero.core.partition.stage import Lifetime

NUM_RANKS = 8
NORM_BYTES = 4 * NUM_RANKS  # at most: it is gathered if there are replicas


class Case(NamedTuple):
    """The first values of FACTORS, and what a step launches beside the collectives of the tensor axis.

    Collectives are exposed if the computation waits for them without having run anything since their launch. Copies
    between the accelerator and the host run beside the computation, on side streams: in one step 14 of shards of
    parameters to the accelerator, 5 of gradients to the host, and 4 of checkpoints in each direction. So do the sums of
    micro-batches, one for each bucket, that are added to a message before it goes between groups.
    """

    values: tuple
    reduce_scatters: int  # none is exposed
    all_reduces: int  # between groups; none is exposed
    all_gathers: tuple[int, int]  # (exposed, all)
    on_side_streams: int = 0


DATA, GROUPS = (4, None, 2), (4, 2, 2)
ON_THE_HOST = "stage 3, shard groups, accumulated locally, on the host"  # runs by default
SETTINGS = {
    "stage 1": Case((1, DATA, 1, "reduce", "none", "none"), 4, 0, (0, 4)),
    "stage 1, shard groups, accumulated locally": Case((1, GROUPS, 2, "local", "none", "none"), 4, 4, (0, 4)),
    "stage 2": Case((2, DATA, 1, "reduce", "none", "none"), 4, 0, (0, 4)),
    "stage 2, shard groups, reduced each time": Case((2, GROUPS, 2, "reduce", "partition", "none"), 8, 4, (0, 4), 4),
    "stage 3": Case((3, DATA, 1, "reduce", "none", "none"), 5, 0, (1, 7)),
    "stage 3, shard groups, reduced each time": Case((3, GROUPS, 2, "reduce", "none", "none"), 10, 5, (2, 14), 5),
    ON_THE_HOST: Case((3, GROUPS, 2, "local", "partition_host", "host"), 5, 5, (2, 14), 14 + 5 + 4 + 4),
}


def launches_of(settings: Settings, rank: int, tensor_mode: QuickFakeTensorMode) -> tuple[list[Launch], int]:
    """Return what a rank launches while it builds the run and trains two steps, and the number before the second."""
    with imitated_world(rank, NUM_RANKS, NUM_RANKS, "nccl") as world:
        mesh = build_mesh(settings, world)
        with tensor_mode, StreamChecker(world.device, records_launches=True) as checker:
            state = build(settings, mesh, world.device)
            micro_batches = blank_micro_batches(settings.train, settings.model.seq_length, mesh.num_batch_ranks)
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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == ON_THE_HOST else pytest.mark.full) for name in SETTINGS]
)
def test_ranks_launch_the_same_collectives_cannot_hang_and_expose_few(name):
    case = SETTINGS[name]
    settings = settings_of(dict(zip(FACTORS, (*case.values, "bf16", "adamw", ""), strict=True)))
    settings = replace(settings, model=replace(settings.model, num_layers=2))
    tensor_mode = QuickFakeTensorMode()  # all ranks share its cache
    launches, firsts = zip(*(launches_of(settings, rank, tensor_mode) for rank in range(NUM_RANKS)), strict=True)

    by_rank = [collectives_by_communicator(of_rank) for of_rank in launches]
    for found in by_rank:
        for communicator, messages in found.items():
            assert all(by_rank[member][communicator] == messages for member in communicator[1])
    assert Job(launches).run() == []

    own, first = launches[0], firsts[0]
    of_step = [launch for launch in own[first:] if launch.is_collective and is_of_states(launch)]
    num_exposed = exposed_in_projection(settings)
    counts = Counter((axis_of(launch), launch.name) for launch in of_step)
    axis = "shard" if GROUPS in case.values else "data"
    expected = {(axis, "reduce_scatter"): (0, case.reduce_scatters), (axis, "all_gather"): case.all_gathers}
    expected |= {("replica", "all_reduce"): (0, case.all_reduces)} if GROUPS in case.values else {}
    assert {key: (num_exposed[key], number) for key, number in counts.items()} == expected
    assert sum(launch.stream.startswith(SIDE_STREAM) for launch in own[first:]) == case.on_side_streams
    if settings.zero.policy.full_params is Lifetime.PERSISTENT:
        last_reduction = max(n for n, launch in enumerate(of_step) if launch.name == "reduce_scatter")
        gathers = [launch for launch in of_step if launch.name == "all_gather"]
        at_most = sum(launch.num_bytes for launch in (*of_step[last_reduction : -len(gathers)], gathers[0]))
        assert waiting_time(own, relative_duration, first) <= at_most + NORM_BYTES


def exposed_in_projection(settings: Settings) -> Counter[tuple[str, str]]:
    """Count the collectives of states that the projection of a dry run finds without a kernel to overlap with."""
    events = dry_run(replace(settings, dry_run=replace(settings.dry_run, world_size=NUM_RANKS))).events
    states = [event for event in events if event.axis != "tensor" and event.message_bytes > NORM_BYTES]
    return Counter((event.axis, event.op) for event in states if event.awaited == event.launched)


def axis_of(launch: Launch) -> str:
    return launch.stream.removeprefix("the communicator ")


def is_of_states(launch: Launch) -> bool:
    """Return whether a collective moves gradients or parameters."""
    return axis_of(launch) != "tensor" and launch.num_bytes > NORM_BYTES


def relative_duration(launch: Launch) -> float:
    """Return the time in which a message of one byte is sent, times the size of this one.

    Meanwhile, the computation reads or writes four bytes: here it takes longer than all messages of states.
    """
    if launch.is_collective:
        return launch.num_bytes if axis_of(launch) != "tensor" else 0
    return launch.num_bytes / 4 if launch.stream == COMPUTATION else 0
