"""Memory and traffic of the model states against the paper's formulas (sections 3, 5 and 7)."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from parallel.mesh import Mesh
from tests.pairwise import pairwise
from tests.ranks import run_cases
from zero.checkpoint import resident
from zero.core.partition.config import DTYPES, DtypeName
from zero.core.partition.stage import STAGES, Lifetime
from zero.data_parallel import ZeroDataParallel
from zero.formulas import memory
from zero.formulas.traffic import axis_bytes
from zero.optimizer import ZeroOptimizer
from zero.settings.config import SumOverRanks, ZeroConfig

BUCKET_NUMEL, WIDTH, NUM_BLOCKS = 2**16, 251, 6
LONGEST_SCALARS = 32  # bytes: numbers of the norm
PAPER: tuple[DtypeName, DtypeName] = ("bf16", "bf16")


def train(
    stage: int,
    num_micro_batches: int,
    shard_size: int | None,
    resident_numel: int,
    gradients: tuple[DtypeName, DtypeName] | None,
    optimizer_over: Literal["group", "all"],
    sums: SumOverRanks,
) -> dict:
    """Train in bf16 with gradients of two types: (accumulate, reduce), or the default ones."""
    dtype = torch.bfloat16
    mesh = Mesh.create(tensor_size=1, shard_size=shard_size)
    mesh.log.keeps_events = True
    accumulate, reduce = gradients or (None, None)
    config = ZeroConfig(
        stage,
        BUCKET_NUMEL,
        resident_numel=resident_numel,
        accumulate_dtype=accumulate,
        reduce_dtype=reduce,
        defragment=True,
        optimizer_over=optimizer_over,
        sum_over_ranks=sums,
        leaf_blocks=mesh.data.size,
    )
    model = ZeroDataParallel(Chain(dtype), mesh.data, config)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, fused=True)
    for _ in range(4 if stage == 3 else 2):  # by the fourth the order of units is known, and the ranks agree on it
        mesh.log.clear()
        before = bytes_written()
        with model.accumulate(num_micro_batches):
            for _ in range(num_micro_batches - 1):
                model(torch.ones(1, WIDTH, dtype=dtype)).backward()
        model(torch.ones(1, WIDTH, dtype=dtype)).backward()
        optimizer.step()
        mesh.barrier()
    flat_bytes = {flat: flat.layout.numel * dtype.itemsize for flat in model.flats}
    return {
        "states": resident.resident_states(model, optimizer),
        "buffers": resident.buffer_bytes(model, optimizer),
        "num_parameters": sum(param.numel() for param in model.module.parameters()),
        "padded_bytes": sum(flat_bytes.values()),
        "resident_bytes": sum(size for flat, size in flat_bytes.items() if flat.lifetime is Lifetime.PERSISTENT),
        "last_block_bytes": flat_bytes[model.flats[-1]],
        "events": mesh.log.events,
        "written": bytes_written() - before,
    }


LAYOUTS = pairwise(
    stage=[1, 2, 3],
    groups=[(2, None, "group"), (4, 2, "group"), (4, 2, "all")],
    num_micro_batches=[1, 2],
    resident_numel=[0, 1000],
    sums=["message", "leaves"],
)
TYPES: dict[str, tuple[DtypeName, DtypeName] | None] = {"message": PAPER, "leaves": None}
# By stage: the default types, which are fp32 twice where full gradients persist and else fp32 and bf16, and the others.
GRADIENTS = [(stage, gradients) for stage in STAGES for gradients in (None, ("fp32", "bf16" if stage < 2 else "fp32"))]


@cache
def all_trained() -> dict[tuple, list[dict]]:
    """Return what each rank has found, by number of ranks and arguments of `train`."""
    cases: dict[int, list[tuple]] = {
        2: [(stage, 2, None, 0, PAPER, "group", "message") for stage in STAGES],
        4: [(stage, 1, None, 0, PAPER, "group", "message") for stage in STAGES],
    }
    cases[2] += [(stage, 2, None, 0, gradients, "group", "message") for stage, gradients in GRADIENTS]
    for stage, (data_size, shard_size, over), num_micro_batches, resident_numel, sums in map(dict.values, LAYOUTS):
        cases[data_size].append((stage, num_micro_batches, shard_size, resident_numel, TYPES[sums], over, sums))
    return {
        (num_ranks, *case): found
        for num_ranks, of_size in cases.items()
        for case, found in zip(of_size, run_cases(num_ranks, train, of_size), strict=True)
    }


def trained(
    data_size: int,
    stage: int,
    num_micro_batches: int,
    shard_size: int | None = None,
    resident_numel: int = 0,
    gradients: tuple[DtypeName, DtypeName] | None = PAPER,
    optimizer_over: Literal["group", "all"] = "group",
    sums: SumOverRanks = "message",
) -> list[dict]:
    arguments = stage, num_micro_batches, shard_size, resident_numel, gradients, optimizer_over, sums
    return all_trained()[data_size, *arguments]


class Chain(nn.Module):
    """A chain of linear layers with 380,000 parameters, and hardly any activations."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize(("data_size", "num_micro_batches"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("stage", STAGES)
def test_model_states_are_the_papers(stage, data_size, num_micro_batches):
    bytes_each = {0: 16, 1: 4 + 12 / data_size, 2: 2 + 14 / data_size, 3: 16 / data_size}[stage]
    for found in trained(data_size, stage, num_micro_batches):
        promised = memory.formula(STAGES[stage], found["num_parameters"], data_size)
        assert promised.total == pytest.approx(bytes_each * found["num_parameters"])
        for kind in ("parameters", "gradients", "master", "moments"):
            assert getattr(found["states"], kind) == pytest.approx(getattr(promised, kind), rel=0.01)
        assert found["states"].total == pytest.approx(promised.total, rel=0.01)


def test_states_of_two_levels_are_divided_over_a_group_and_over_all_ranks():
    data_size, group_sizes, policy = 4, (1, 2), ZeroConfig(3, optimizer_over="all").policy
    cases = [(3, 2, group_size, 0, ("fp32", "bf16"), "all", "message") for group_size in group_sizes]
    for group_size, found in zip(group_sizes, run_cases(data_size, train, cases), strict=True):
        num_parameters = found[0]["num_parameters"]
        promised = memory.formula(policy, num_parameters, data_size, gradient_bytes=4, group_size=group_size)
        assert promised.total == pytest.approx((2 / group_size + 4 / group_size + 12 / data_size) * num_parameters)
        for kind in ("parameters", "gradients", "master", "moments"):  # padding has none, and is of the last ranks
            mean = sum(getattr(rank["states"], kind) for rank in found) / data_size
            assert mean == pytest.approx(getattr(promised, kind), rel=0.01)


@pytest.mark.parametrize(("stage", "gradients"), GRADIENTS)
def test_other_types_of_gradients_cost_what_the_formulas_say(stage, gradients):
    """Default: sums in fp32, reduced in fp32 where full gradients persist. A cast needs blocks of a bucket."""
    is_persistent, num_micro_batches, data_size = stage < 2, 2, 2
    bytes_each = {0: 18, 1: 6 + 12 / data_size, 2: 2 + 16 / data_size, 3: 18 / data_size}[stage]
    reduce = gradients[1] if gradients else "fp32" if is_persistent else "bf16"
    for found in trained(data_size, stage, num_micro_batches, gradients=gradients):
        promised = memory.formula(STAGES[stage], found["num_parameters"], data_size, gradient_bytes=4)
        assert promised.total == pytest.approx(bytes_each * found["num_parameters"])
        assert found["states"].gradients == pytest.approx(promised.gradients, rel=0.01)
        assert found["states"].total == pytest.approx(promised.total, rel=0.01)
        has_blocks = not is_persistent or gradients == ("fp32", "bf16")
        largest_bucket = BUCKET_NUMEL if stage < 3 else found["last_block_bytes"] // 2
        assert found["buffers"]["staged gradients"] == 3 * largest_bucket * DTYPES[reduce].itemsize * has_blocks
        assert found["buffers"]["gradient cast"] == 0
        sent = sum(event.wire_bytes for event in found["events"] if event.message_bytes > LONGEST_SCALARS)
        shard_size = 1 if stage == 0 else data_size
        assert sent == sum(
            axis_bytes(
                STAGES[stage],
                found["padded_bytes"],
                (shard_size, data_size // shard_size),
                num_micro_batches,
                gradient_bytes=(found["padded_bytes"] * DTYPES[reduce].itemsize / 2,) * 2,
                kept_bytes=found["last_block_bytes"],
            )
        )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_traffic_of_a_step_is_twice_the_parameters(stage):
    """Padded buckets are sent, 2 Psi (N-1)/N: by a reduce-scatter and an all-gather, or the all-reduce that is both."""
    data_size = 4
    for found in trained(data_size, stage, 1):
        buckets = [event for event in found["events"] if event.message_bytes > LONGEST_SCALARS]
        expected_ops = {"all_reduce"} if stage == 0 else {"reduce_scatter", "all_gather"}
        assert {event.op for event in buckets} == expected_ops
        assert sum(event.wire_bytes for event in buckets) == 2 * found["padded_bytes"] * (data_size - 1) // data_size
        assert max(event.message_bytes for event in buckets) <= BUCKET_NUMEL * 2
        assert found["padded_bytes"] <= 1.001 * 2 * found["num_parameters"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_traffic_along_each_axis(layout):
    """Stage 3 gathers parameters twice, except those that persist.

    The root, which has no parameters here, and the last block stay unsharded from forward to backward.
    """
    stage, (data_size, shard_size, over), num_micro_batches, resident_numel, sums = layout.values()
    config = ZeroConfig(stage, optimizer_over=over, sum_over_ranks=sums)
    types = config.gradient_types(torch.bfloat16)
    for found in trained(data_size, stage, num_micro_batches, shard_size, resident_numel, TYPES[sums], over, sums):
        sent = Counter()
        for event in found["events"]:
            sent[event.axis] += event.wire_bytes if event.message_bytes > LONGEST_SCALARS else 0
        inner = shard_size or data_size
        of_leaves = tuple(found["padded_bytes"] // 2 * each.itemsize for each in (types.reduce, types.accumulate))
        expected = axis_bytes(
            config.policy,
            found["padded_bytes"],
            (inner, data_size // inner),
            num_micro_batches,
            gradient_bytes=of_leaves if sums == "leaves" else None,
            resident_bytes=found["resident_bytes"],
            kept_bytes=found["last_block_bytes"],
        )
        assert (sent["shard" if shard_size else "data"], sent["replica"]) == expected


def test_buffers_do_not_depend_on_the_model():
    found = trained(2, 2, 2)[0]
    assert found["buffers"]["staged gradients"] <= 3 * BUCKET_NUMEL * 2
    assert found["buffers"]["received messages"] <= 4 * BUCKET_NUMEL * 2
    assert found["buffers"]["gradient cast"] == BUCKET_NUMEL // 2 * 4


@pytest.mark.parametrize("data_size", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_the_wire_agrees_with_the_log(stage, data_size):
    """The kernel counts what a rank writes to its sockets: the bytes of its log, and 2% for scalars and headers."""
    for found in trained(data_size, stage, {2: 2, 4: 1}[data_size]):
        assert found["written"] == pytest.approx(sum(event.wire_bytes for event in found["events"]), rel=0.02)


def bytes_written() -> int:
    """Return the bytes that this process has written to files and sockets.

    The counter of the loopback device would include those of other processes.
    """
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["wchar"])
