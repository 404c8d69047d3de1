"""The data types in which gradients are summed and reduced: the error of the sums, and the types of all messages."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from unittest import mock

import torch
from torch import Tensor, nn

from gpt.builder.train_state import build
from gpt.settings.data import DataSettings
from gpt.settings.settings import Settings
from gpt.settings.training import ParallelSettings, TrainSettings
from gpt.shape.config import ModelConfig
from gpt.train_step import train_step
from lab.races.simulated_streams import COMPUTATION
from parallel import streams
from parallel.mesh import Axis, Mesh
from tests.checked_streams import run_checked
from tests.pairwise import pairwise
from tests.ranks import run_cases, run_ranks
from zero.core.partition.config import DTYPES
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, SumOverRanks, ZeroConfig

WIDTH = 24
Inputs = Callable[[int, int], tuple[Tensor, Tensor]]  # (rank, micro-batch) -> (x, y) of type fp64
HOST = OffloadConfig("host")
FP32 = {"accumulate_dtype": "fp32", "reduce_dtype": "fp32"}


class Bilinear(nn.Module):
    """Blocks W with the loss y W x, whose gradient is the outer product of y and x: rounded once, to W's type."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return sum((y * block(x)).sum() for block in self.blocks)


def gradient(
    inputs: Inputs,
    num_micro_batches: int,
    config: ZeroConfig,
    dtype: torch.dtype,
    mesh: Mesh,
    offload: OffloadConfig = NO_OFFLOAD,
    num_steps: int = 1,
) -> Tensor:
    """Return the gradient of the blocks, summed over micro-batches and averaged over ranks, as its owners hold it."""
    model = ZeroDataParallel(Bilinear(dtype), mesh.data, config, offload=offload)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.0)
    found: list[Tensor] = []

    def read() -> None:
        for flat in model.flats:
            full = torch.zeros(flat.layout.numel, dtype=torch.float64)
            for bucket in flat.buckets:
                full[bucket.ranges.own.start : bucket.ranges.own.stop] = bucket.grads.own.double()
            model.shard_axis.all_reduce(full, out=full).wait()
            found.extend(span.view(full) for span in flat.layout.spans)

    for _ in range(num_steps):
        found.clear()
        for micro_batch in range(num_micro_batches):
            with nullcontext() if micro_batch == num_micro_batches - 1 else model.accumulate():
                model(*(tensor.to(dtype) for tensor in inputs(mesh.data.rank, micro_batch))).backward()
        optimizer.step(gradient_hook=read)
    optimizer.take_changes()  # waits for the gathers between groups, for which no forward waits any more
    return torch.stack(found)


def expected(inputs: Inputs, num_micro_batches: int, num_ranks: int) -> Tensor:
    outer = sum(torch.outer(*reversed(inputs(r, m))) for r in range(num_ranks) for m in range(num_micro_batches))
    return (outer / num_ranks).expand(2, -1, -1)


def random_inputs(rank: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Return random vectors of bf16 numbers that are mostly positive, so that sums grow."""
    generator = torch.Generator().manual_seed(1000 * rank + micro_batch)
    x, y = torch.rand(2, WIDTH, generator=generator).add(0.2).bfloat16().double()
    return x, y


def same_inputs(rank: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Return vectors whose products are bf16 numbers, the same for each micro-batch."""
    return torch.arange(1.0, WIDTH + 1, dtype=torch.float64), torch.full((WIDTH,), 2.0**-7, dtype=torch.float64)


def relative_error(num_micro_batches: int, stage: int, types: dict[str, str]) -> float:
    mesh = Mesh.create(tensor_size=1)
    reference = expected(random_inputs, num_micro_batches, mesh.data.size)
    config = ZeroConfig(stage, bucket_numel=500, **types)
    grad = gradient(random_inputs, num_micro_batches, config, torch.bfloat16, mesh)
    return float((grad - reference).norm() / reference.norm())


def test_the_error_of_many_micro_batches_is_small():
    """With sums in bf16 it would be 5.5e-3 or more."""
    for types, allowed in (({}, 3e-3), (FP32, 5e-4)):
        cases = [(64, stage, types) for stage in (1, 3)]  # whose full gradients persist, or do not
        for case, errors in zip(cases, run_cases(2, relative_error, cases), strict=True):
            assert max(errors) < allowed, case


def allocate_on_computation(like: Tensor, numel: int) -> Tensor:
    """Return a new buffer; check that no side stream allocates it, to which its memory would belong for ever."""
    simulated = streams.active_simulation()
    assert simulated is None or simulated.current_stream.name == COMPUTATION
    return like.new_empty(numel)


def half_types_differ(stages: list[int], pairs: list[tuple[str, str]], sums: SumOverRanks = "message") -> list[str]:
    """Return the cases whose gradient differs from that of the same types on the accelerator, without parts."""
    different = []
    whole, parts = (
        Mesh.create(tensor_size=1),
        Mesh.create(tensor_size=1, shard_size=2, allocate=allocate_on_computation),
    )
    layouts = ((whole, HOST, False), (parts, NO_OFFLOAD, True), (parts, HOST, True))
    factors = {"stage": stages, "types": pairs, "layout": [0, 1, 2], "over": ["group", "all"]}
    for stage, (accumulate, reduce), layout, over in map(dict.values, pairwise(**factors)):
        types = {"accumulate_dtype": accumulate, "reduce_dtype": reduce, "sum_over_ranks": sums}
        config = ZeroConfig(stage, bucket_numel=500, **types)
        reference = gradient(same_inputs, 3, config, torch.bfloat16, whole)
        error = (reference - expected(same_inputs, 3, whole.data.size)).abs().max() / reference.max()
        if error > 2**-8:
            different.append(f"{config}: {error}")
        mesh, offload, transient = layouts[layout]
        chosen = ZeroConfig(stage, 500, defragment=not transient, optimizer_over=over, **types)
        if not gradient(same_inputs, 3, chosen, torch.bfloat16, mesh, offload, num_steps=2).equal(reference):
            different.append(f"{chosen} {offload.mode} {mesh.data.parts is not None}")
    return different


def test_every_pair_of_types_works_with_shard_groups_and_on_the_host():
    assert run_ranks(4, half_types_differ, [1, 2, 3], [*product(("fp32", "bf16"), repeat=2)]) == [[]] * 4


def fp32_sums_differ() -> list[str]:
    """Return the cases that differ with the messages of NCCL: exchanges in the place of reductions."""
    with mock.patch.object(Axis, "_is_gloo", False):
        return half_types_differ([1, 3], [("fp32", "bf16"), ("bf16", "fp32")], "fp32")


def test_an_exchange_and_a_sum_are_a_reduction():
    assert run_checked(4, fp32_sums_differ) == [[]] * 4


def extreme_fp16() -> list[list[float]]:
    mesh = Mesh.create(tensor_size=1)

    def inputs(_rank: int, _micro_batch: int) -> tuple[Tensor, Tensor]:
        x = torch.zeros(WIDTH, dtype=torch.float64)
        x[0], x[1] = 2.0**-23, 20000.0
        return x, torch.ones(WIDTH, dtype=torch.float64)

    return [gradient(inputs, 1, ZeroConfig(stage), torch.float16, mesh)[0, 0, :2].tolist() for stage in (2, 3)]


def test_fp16_neither_overflows_nor_vanishes_on_the_way():
    """On 4 ranks the sum of 20000 is above the largest number, and a quarter of 2**-23 below the smallest."""
    assert run_ranks(4, extreme_fp16)[0] == [[2.0**-23, 20000.0]] * 2


def messages_of_tensor_ranks(reduce: str) -> tuple[set[tuple[str, str]], list[str]]:
    """Return what tensor ranks with own tokens send: (op, type) in backward, and the types of the sums of two steps."""
    train = TrainSettings(micro_batch_size=1, global_batch_size=4)
    parallel = ParallelSettings(tensor_size=2, sequence_parallel=True)
    settings = Settings(
        ModelConfig(2, 16, 2, 8, 32), DataSettings("unread"), parallel, ZeroConfig(2, reduce_dtype=reduce), train=train
    )
    mesh = Mesh.create(tensor_size=2)
    state = build(settings, mesh, torch.device("cpu"))
    mesh.log.keeps_events = True
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    for _ in range(2):
        train_step(state.model, state.optimizer, [tokens, tokens], mesh)
    events = [event for event in mesh.log.events if event.phase == "backward"]
    assert {str(e.dtype) for e in events if e.axis == "data"} == {str(DTYPES[reduce])}
    # Without the norm, one number.
    sums = [event for event in mesh.log.events if event.phase == "update" and event.message_bytes > 8]
    activations = {(event.op, str(event.dtype)) for event in events if event.axis == "tensor"}
    return activations, [str(event.dtype) for event in sums if event.axis == "tensor"]


def test_tensor_ranks_sum_gradients_of_parameters_in_the_chosen_type():
    """Activations keep their type: they are gathered and reduce-scattered. Gradients are summed once a step."""
    activations = {("all_gather", "torch.bfloat16"), ("reduce_scatter", "torch.bfloat16")}
    names = ("fp32", "bf16")
    for reduce, found in zip(names, run_cases(4, messages_of_tensor_ranks, [(name,) for name in names]), strict=True):
        assert found == [(activations, 2 * [str(DTYPES[reduce])])] * 4


def test_the_defaults_are_exact_and_cost_no_traffic():
    bf16, fp32 = torch.bfloat16, torch.float32
    for stage, accumulates, types in (
        *((0, True, (fp32, fp32)), (1, True, (fp32, fp32)), (0, False, (bf16, bf16)), (1, False, (bf16, bf16))),
        *((2, True, (fp32, bf16)), (3, True, (fp32, bf16)), (2, False, (fp32, bf16)), (3, False, (fp32, bf16))),
    ):
        assert ZeroConfig(stage).gradient_types(bf16, accumulates=accumulates) == types
    assert ZeroConfig(3, accumulate="local").gradient_types(bf16) == (fp32, fp32)
    assert ZeroConfig(2).gradient_types(torch.float64) == (torch.float64, torch.float64)
    named = ZeroConfig(1).with_gradient_types(bf16, accumulates=False)
    assert (named.accumulate_dtype, named.reduce_dtype) == ("bf16", "bf16")
