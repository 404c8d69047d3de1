"""The conformance suite of transports and homes: a new one brings a row of `ROWS`."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from lab.races.stream_checker import StreamError, streams_checked
from parallel.mesh import Axis, Mesh
from parallel.validation.errors import ConfigError
from parallel.world import imitated_world
from tests.checked_streams import run_checked
from tests.distributed.zero.transports.codec import WholeNumbers
from tests.distributed.zero.transports.conformance import (
    Row,
    batch_of,
    examined,
    in_one_process,
    train_all,
    train_imitated,
    wrapped,
)
from tests.distributed.zero.transports.eight_bit import EightBit
from tests.distributed.zero.transports.mapped_file import MappedFile
from tests.pairwise import noting
from tests.ranks import run_ranks
from zero import ZeroConfig, ZeroDataParallel, full_state_dict, save
from zero.core.partition.config import NUM_STAGED
from zero.core.partition.layout import BucketRange
from zero.core.partition.stage import STAGES, GradientTypes
from zero.core.protocols.gradient_sum import GradientPath
from zero.core.protocols.home import Home
from zero.core.protocols.transport import AllReduce, Direct, Transport, TransportOf
from zero.homes.on_host import OnHost
from zero.transports.coded import Coded
from zero.transports.fixed_order import FixedOrder
from zero.transports.two_level import TwoLevel


def along_another_axis(data: Axis) -> TransportOf:
    """Return the transports of layers of which each place of a group has a kind: its replicas divide it."""
    _, replicas = data.parts or (data, data)
    of_kinds, of_all = Direct(replicas, num_ranks=data.size, counted=data), Direct(data)
    return lambda name, _param: of_kinds if ".kinds." in name else of_all


def of_each_parameter(data: Axis) -> TransportOf:
    return lambda _name, _param: Direct(data)


def coded(data: Axis, base: Callable[[Axis], Transport] = Direct) -> Coded:
    return Coded(base(data), WholeNumbers())


def two_level(data: Axis, *, over_all: bool = False, in_fp32: bool = False) -> TwoLevel:
    inner, outer = data.parts or (data, data)
    return TwoLevel(data, inner, outer, over_all=over_all, in_fp32=in_fp32)


def fixed_order(data: Axis, *, num_blocks: int = 1, over_all: bool = False) -> FixedOrder:
    inner, outer = data.parts or (data, data.without_peers())
    return FixedOrder(data, inner, outer, num_blocks=num_blocks, over_all=over_all)


def fixed_all_reduce(data: Axis) -> FixedOrder:
    return FixedOrder(data, data.without_peers(), data, num_blocks=data.size)


CPU = torch.device("cpu")
GATHER, SCATTER = ("all_gather", "data", 1.0), ("reduce_scatter", "data", 1.0)
GATHER_SHARD, SCATTER_SHARD = ("all_gather", "shard", 1.0), ("reduce_scatter", "shard", 1.0)
GATHER_REPLICA, EXCHANGE_REPLICA = ("all_gather", "replica", 0.5), ("all_to_all", "replica", 0.5)
EXCHANGE, EXCHANGE_SHARD = ("all_to_all", "data", 1.0), ("all_to_all", "shard", 1.0)
two_blocks = partial(fixed_order, num_blocks=2)
coded_over_all = partial(coded, base=partial(two_level, over_all=True))
HOST = {"home": OnHost}
DIRECT = {"gather": [GATHER], "reduce": [SCATTER], "last": [SCATTER]}
GROUPS = {
    "gather": [GATHER_SHARD],
    "reduce": [SCATTER_SHARD],
    "last": [SCATTER_SHARD, ("all_reduce", "replica", 0.5)],
}
OVER_ALL = GROUPS | {"last": [SCATTER_SHARD, ("reduce_scatter", "replica", 0.5)], "publish": [GATHER_REPLICA]}
CODED_OVER_ALL = OVER_ALL | {"lossy": [GATHER_SHARD]}
FIXED = {"gather": [GATHER], "reduce": [EXCHANGE], "last": [EXCHANGE]}
FIXED_GROUPS = GROUPS | {"reduce": [EXCHANGE_SHARD], "last": [EXCHANGE_SHARD, EXCHANGE_REPLICA, GATHER_REPLICA]}
FIXED_OVER_ALL = OVER_ALL | FIXED_GROUPS | {"last": [EXCHANGE_SHARD, EXCHANGE_REPLICA]}
ROWS = {
    "all-reduce": Row(AllReduce, 2, (0,), {"last": [("all_reduce", "data", 1.0)]}),
    "direct": Row(Direct, 2, (1, 2, 3), DIRECT),
    "direct, of each parameter": Row(of_each_parameter, 2, (1, 2, 3), DIRECT),
    "direct, host": Row(Direct, 2, (1, 2, 3), DIRECT, **HOST),
    "direct, mapped file": Row(Direct, 2, (2, 3), DIRECT, home=MappedFile),
    "along another axis": Row(along_another_axis, 4, (1, 2, 3), DIRECT, 2, has_kinds=True),
    "two levels": Row(two_level, 4, (1, 2, 3), GROUPS, 2),
    "two levels, host": Row(two_level, 4, (1, 2, 3), GROUPS, 2, **HOST),
    "two levels, over all": Row(partial(two_level, over_all=True), 4, (1, 2, 3), OVER_ALL, 2),
    "two levels, over all, host": Row(partial(two_level, over_all=True), 4, (1, 2, 3), OVER_ALL, 2, **HOST),
    "groups of one rank, over all": Row(
        partial(two_level, over_all=True),
        2,
        (1, 2, 3),
        {"last": [("reduce_scatter", "replica", 1.0)], "publish": [("all_gather", "replica", 1.0)]},
        1,
    ),
    "fixed order": Row(fixed_order, 2, (2, 3), FIXED, can_keep=False),
    "fixed order, host": Row(fixed_order, 2, (2, 3), FIXED, **HOST, can_keep=False),
    "fixed order of kept gradients": Row(two_blocks, 2, (1,), FIXED),
    "fixed order of an all-reduce": Row(
        fixed_all_reduce, 2, (0,), {"last": [("all_to_all", "data", 1.0), ("all_gather", "data", 1.0)]}
    ),
    "fixed order of groups": Row(two_blocks, 4, (2, 3), FIXED_GROUPS, 2, can_keep=False),
    "fixed order of groups, host": Row(
        partial(fixed_order, num_blocks=2), 4, (2, 3), FIXED_GROUPS, 2, can_keep=False, **HOST
    ),
    "fixed order of groups, kept": Row(partial(fixed_order, num_blocks=4), 4, (1,), FIXED_GROUPS, 2),
    "fixed order of groups, over all": Row(
        partial(fixed_order, num_blocks=2, over_all=True), 4, (2, 3), FIXED_OVER_ALL, 2, can_keep=False
    ),
    "coded": Row(coded, 2, (1, 2, 3), DIRECT | {"lossy": [GATHER]}, is_lossy=True),
    "coded, over all": Row(coded_over_all, 4, (1, 2, 3), CODED_OVER_ALL, 2, is_lossy=True),
    "coded, over all, host": Row(coded_over_all, 4, (1, 2, 3), CODED_OVER_ALL, 2, is_lossy=True, **HOST),
    "8 bits": Row(EightBit, 2, (1, 2, 3), FIXED, is_lossy=True),
}
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@each_row
@pytest.mark.parametrize("run", [run_ranks, pytest.param(run_checked, marks=pytest.mark.full)])
def test_training_equals_one_process(row, run):
    """Stages take 3 micro-batches, the last one 1 too; a step is skipped by all ranks if one has an infinite loss."""
    cases = [*product(row.stages, (3,)), (row.stages[-1], 1)] if run is run_ranks else [*product(row.stages, (1, 3))]
    of_ranks = run(row.num_ranks, train_all, row, cases)
    for number, (_, num_micro_batches) in enumerate(cases):
        num_kinds = row.shard_size if row.has_kinds and row.shard_size else 1
        expected = in_one_process(row.num_ranks, num_kinds, num_micro_batches)
        for rank, found in enumerate(results[number] for results in of_ranks):
            of_kind = {name.replace("kinds.0", f"kinds.{row.kind_of(rank)}"): name for name in found.params}
            params = {name: found.params[of_kind[name]] for name in of_kind}
            chosen = {name: param for name, param in expected.params.items() if name in params}
            with noting((rank, cases[number])):
                last, tolerances = len(found.norms), {"rtol": 0, "atol": 1e-10}
                if row.is_lossy:
                    last, tolerances = 1, {"rtol": 0.02, "atol": 0}
                torch.testing.assert_close(found.losses[:last], expected.losses[:last], **tolerances)
                torch.testing.assert_close(found.norms[:last], expected.norms[:last], **tolerances)
                assert row.is_lossy or torch.testing.assert_close(params, chosen, **tolerances) is None
                assert found.num_skipped == 1
                same = of_ranks[row.kind_of(rank)][number]
                assert found.norms == same.norms
                assert all(param.equal(same.params[name]) for name, param in found.params.items())


@each_row
def test_a_bucket_sends_what_its_row_says_and_leaves_no_buffer(row):
    expected = row.messages if row.stages[-1] > 1 else {k: v for k, v in row.messages.items() if k != "reduce"}
    for found, num_bytes in run_ranks(row.num_ranks, examined, row):
        assert found.keys() == expected.keys()
        for name, sent in found.items():
            assert [each[:2] for each in sent] == [each[:2] for each in expected[name]]
            assert [each[2] for each in sent] == pytest.approx([each[2] for each in expected[name]], rel=0.04)
        assert num_bytes == 0 or row.stages[-1] < 3


def sums_in_8_bits() -> list[float]:
    """Return the largest error of the sum of n means of the same gradients, for some n, times n without feedback."""
    axis, elements = Mesh.create(tensor_size=1).data, range(64)
    transport = EightBit(axis).open(CPU, keeps_full=False).bind(BucketRange(elements, axis.size).ranges(axis.rank))
    gradients = torch.randn(axis.size, 64, generator=torch.Generator().manual_seed(0))
    path = GradientPath(GradientTypes(torch.float32, torch.float32), STAGES[2])
    total = Home(CPU).gradient_sum(transport.ranges, path, None, gives_means=True)
    errors = []
    for number in range(1, 201):
        transport.reduce(gradients[axis.rank].clone(), total, is_last=False).wait()
        mean = transport.ranges.of_bucket(gradients.mean(dim=0), transport.ranges.own)
        errors.append((total.own - number * mean).abs().max().item())
    return errors


def test_error_feedback_keeps_the_error_of_a_sum():
    for errors in run_ranks(2, sums_in_8_bits):
        assert errors[0] > 1e-3
        assert max(errors[100:]) < 4 * max(errors[:10])  # without it, 200 times the first


def staged() -> float:
    """Return how many buckets wait at most to be reduced, if half of the layers of a model have another transport."""
    row = ROWS["along another axis"]
    model, _ = wrapped(row, 2, Mesh.create(tensor_size=1, shard_size=2).data, bucket_numel=300)
    model(batch_of(0, 0, model.data.rank, row, 1)[0], True).backward()
    return model.reducer.reductions.staging.num_bytes / 8 / max(len(bucket.ranges.elements) for bucket in model.buckets)


def test_buckets_do_not_wait_for_those_of_another_transport():
    assert max(run_ranks(4, staged)) <= NUM_STAGED + 2  # two are filling, one of each transport


def refusals() -> list[str]:
    """Return what is said of a model whose parameters are divided over different ranks, by what does not know it."""
    data = Mesh.create(tensor_size=1, shard_size=2).data
    model, optimizer = wrapped(ROWS["along another axis"], 3, data)
    found = []
    for refused in (
        partial(save, Path("unwritten"), model, optimizer),
        model.state_dict,
        partial(full_state_dict, model),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        found.append(str(caught.value))
    with pytest.raises(ConfigError, match=r"stage=3 with transport AllReduce\(data\) of scale; choose stage 0"):
        ZeroDataParallel(model.unwrap(), data, ZeroConfig(3), transport=AllReduce(data))
    return found


def test_what_needs_one_division_refuses_several():
    for found in run_ranks(4, refusals):
        assert all("divided over a part of the ranks, by Direct(" in message for message in found)


HALF = {
    "direct in fp32": Row(partial(Direct, in_fp32=True), 2, (1, 3), FIXED),
    "all-reduce in fp32": Row(partial(AllReduce, in_fp32=True), 2, (0,), {"last": [EXCHANGE, GATHER]}),
    "two levels in fp32": Row(
        partial(two_level, in_fp32=True),
        4,
        (1, 3),
        GROUPS | {"reduce": [EXCHANGE_SHARD], "last": [EXCHANGE_SHARD, EXCHANGE_REPLICA, GATHER_REPLICA]},
        2,
    ),
}
CASES = [
    pytest.param(name, stage, number, marks=() if (stage, number) == (row.stages[-1], 3) else pytest.mark.full)
    for name, row in (ROWS | HALF).items()
    for stage, number in product(row.stages, (1, 3))
]


@pytest.mark.parametrize(("name", "stage", "num_micro_batches"), CASES)
def test_nothing_races_over_nccl(name, stage, num_micro_batches):
    row = (ROWS | HALF)[name]
    with imitated_world(row.num_ranks - 1, row.num_ranks, row.num_ranks, "nccl"), streams_checked(CPU):
        train_imitated(row, stage, num_micro_batches)


OFTEN = "direct", "two levels, over all", "fixed order of groups"  # run their mutants in the default suite
MUTANTS = [
    pytest.param(name, *operation, marks=() if name in OFTEN else pytest.mark.full)
    for name, row in (ROWS | HALF).items()
    for operation in dict.fromkeys(message[:2] for sent in row.messages.values() for message in sent)
]


@pytest.mark.parametrize(("name", "op", "axis"), MUTANTS)
def test_a_wait_that_is_missing_is_reported(name, op, axis):
    row = (ROWS | HALF)[name]
    world = imitated_world(row.num_ranks - 1, row.num_ranks, row.num_ranks, "nccl")
    with world, pytest.raises(StreamError), streams_checked(CPU):
        train_imitated(row, row.stages[-1], 3, without=(op, axis))
