"""Model states in host memory: the same training, less accelerator memory, and no operation that uses both memories."""

import itertools

import pytest
import torch

from lab.observe.memory_tracker import MemoryTracker
from parallel.memory_kinds import Placement, TensorKind
from parallel.mesh import Mesh
from tests.distributed.zero.memory.kept_apart import KeptApart
from tests.distributed.zero.test_zero_equals_one_process import Case, assert_equal_one_process, case_of
from tests.models import batch, build, loss_of
from tests.pairwise import pairwise
from tests.ranks import run_cases, run_ranks
from zero.checkpoint import resident
from zero.data_parallel import ZeroDataParallel
from zero.formulas import memory
from zero.formulas.memory import ModelStates
from zero.optimizer import ZeroOptimizer
from zero.settings.config import OffloadConfig, ZeroConfig

OPTIMIZER, PARAMETERS, BOTH = ("optimizer",), ("parameters",), ("optimizer", "parameters")

FACTORS = {
    "name": ["gpt", "toy", "albert"],
    "stage": [0, 1, 2, 3],
    "offload": [OffloadConfig("host", states) for states in (OPTIMIZER, PARAMETERS, BOTH)],
    "sizes": [(1, None), (2, None), (2, 1)],
    "optimizer_over": ["group", "all"],
    "num_micro_batches": [1, 3],
    "overlap": [True, False],
    "accumulate": ["reduce", "local"],
}


def cases_of(combinations: list[dict]) -> list[Case]:
    """Return the combinations in which something is offloaded."""
    return [
        case_of(**combination, bucket_numel=2500, prefetch_numel=4000)
        for combination in combinations
        if combination["offload"].states != PARAMETERS or combination["stage"] == 3
    ]


def test_every_placement_equals_one_process():
    assert_equal_one_process(cases_of(pairwise(**FACTORS)))


def times_of_gathers_between_groups() -> list[tuple[float, float]]:
    """Return when each gather of an update was launched and waited for, counted in what the log records."""
    mesh = Mesh.create(tensor_size=1, shard_size=1)
    zero = ZeroConfig(3, bucket_numel=1500, optimizer_over="all")
    model = ZeroDataParallel(build("gpt"), mesh.data, zero, offload=OffloadConfig("host"))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, fused=True)
    loss_of(model, batch(0, 0, mesh.data.rank)).backward()
    with mesh.log.keeping_events(itertools.count().__next__) as events:
        optimizer.step()
        optimizer.take_changes()
    gathers = [event for event in events if (event.op, event.axis) == ("all_gather", "replica")]
    return [(event.launched, event.awaited) for event in gathers]


def test_two_gathers_of_parameters_on_the_host_are_under_way_while_others_are_updated():
    for times in run_ranks(2, times_of_gathers_between_groups):
        assert len(times) > 3
        for (_, first_awaited), (second, _), (third, _) in zip(times, times[1:], times[2:], strict=False):
            assert second < first_awaited < third


def train_with_memories_apart(config: ZeroConfig, offload: OffloadConfig) -> tuple:
    """Train a bf16 model for two steps of two micro-batches, and check that no operation but a copy uses both memories.

    Return the model states on the accelerator and on the host, the bytes that the tracker counts in each, the number of
    elements of all flat buffers, and the number of copies between the memories.
    """
    mesh = Mesh.create(tensor_size=1)
    with MemoryTracker(torch.device("cpu")) as tracker:
        gpt = build("gpt", dtype=torch.bfloat16)
        model = ZeroDataParallel(gpt, mesh.data, config, offload=offload)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, clip_norm=1.0, fused=True)
        with KeptApart(tracker) as apart:
            for step in range(2):
                with model.accumulate():
                    loss_of(model, batch(step, 0, mesh.data.rank)).backward()
                loss_of(model, batch(step, 1, mesh.data.rank)).backward()
                optimizer.step()
        found = [resident.resident_states(model, optimizer, placement) for placement in Placement]
        counted = [dict(pool.resident) for pool in (tracker.device, tracker.host)]
    return *found, counted, sum(flat.layout.numel for flat in model.flats), apart.num_copies


# Bytes on the accelerator at two ranks: full parameters and gradients that persist, and states not offloaded. Gradients
# are summed in fp32.
LEFT_PER_PARAMETER = {
    (0, OPTIMIZER): 6,
    (1, OPTIMIZER): 6,
    (2, BOTH): 2,
    (3, OPTIMIZER): 1,
    (3, PARAMETERS): 8,
    (3, BOTH): 0,
}


def test_offloaded_states_are_on_the_host_and_the_others_on_the_accelerator():
    """With both states offloaded, 2 bytes a parameter stay on the accelerator in stage 2, and none in stage 3."""
    data_size = 2
    cases = [
        (ZeroConfig(stage, bucket_numel=15000, defragment=True), OffloadConfig("host", states))
        for stage, states in LEFT_PER_PARAMETER
    ]
    for (config, offload), of_ranks in zip(cases, run_cases(data_size, train_with_memories_apart, cases), strict=True):
        for device, host, counted, numel, num_copies in of_ranks:
            states_of_rank = memory.formula(config.policy, numel, data_size, gradient_bytes=4)
            promised = memory.placed(states_of_rank, config.policy, data_size, set(offload.states))
            assert (device, host) == (promised.accelerator, promised.host)
            assert device.total / numel == pytest.approx(LEFT_PER_PARAMETER[config.stage, offload.states])
            for pool, states_of_pool in zip(counted, (device, host), strict=True):
                assert_tracker_agrees(pool, states_of_pool)
            assert num_copies


def assert_tracker_agrees(pool: dict, states: ModelStates) -> None:
    assert pool.get(TensorKind.MASTER, 0) == states.master
    assert pool.get(TensorKind.GRADIENTS, 0) == states.gradients
    assert pool.get(TensorKind.MOMENTS, 0) >= states.moments  # and step counters
