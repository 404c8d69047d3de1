"""Every stage trains as one process does: losses, gradient norms and parameters after 3 AdamW steps."""

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Mesh
from tests.models import HARDER_MODELS, MODELS, batch, build, loss_of
from tests.pairwise import pairwise, product_of
from tests.ranks import run_ranks
from tests.twins import params_of
from zero.engine import ZeroDataParallel
from zero.memory.placement import NO_OFFLOAD, OffloadConfig
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig

NUM_STEPS, CLIP_NORM, LR, WEIGHT_DECAY = 3, 0.5, 1e-2, 0.1

# float64: rounding is about 1e-16 and Adam divides by at least eps, so a difference above 1e-10 is a mistake.
# float32: a gradient is a sum of rounded terms; allow 64 roundings of 2**-24 on gradients that are clipped to 0.5.
# A step moves a parameter by lr * grad / (|grad| + eps) at most, so an error in the gradient grows by lr / eps.
EPS = {torch.float64: 1e-8, torch.float32: 0.1}
TOLERANCE = {torch.float64: 1e-10, torch.float32: NUM_STEPS * (64 * 2**-24 * CLIP_NORM) * LR / 0.1 + 64 * 2**-24 * 5}


@dataclass(frozen=True)
class Result:
    losses: list[float]
    grad_norms: list[float]
    params: dict[str, Tensor]

    def distance(self, other: "Result") -> float:
        assert self.params.keys() == other.params.keys()
        numbers = zip(self.losses + self.grad_norms, other.losses + other.grad_norms, strict=True)
        params = ((self.params[name] - other.params[name]).abs().max().item() for name in self.params)
        # Not `max`, which drops NaN.
        return torch.tensor([*(abs(a - b) for a, b in numbers), *params], dtype=torch.float64).max().item()


@cache
def train_in_one_process(name: str, data_size: int, num_micro_batches: int, dtype: torch.dtype) -> Result:
    model = build(name, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS[dtype])
    losses, norms = [], []
    for step in range(NUM_STEPS):
        total = 0.0
        for micro_batch, rank in itertools.product(range(num_micro_batches), range(data_size)):
            loss = loss_of(model, batch(step, micro_batch, rank)) / (num_micro_batches * data_size)
            loss.backward()
            total += loss.item()
        for param in model.parameters():  # a parameter that no rank used has a gradient of zero, and decays
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses, norms, {name: param.detach() for name, param in model.named_parameters()})


def train_with_zero(
    name: str,
    config: ZeroConfig,
    num_micro_batches: int,
    checkpoints: bool,
    dtype: torch.dtype,
    shard_size: int | None = None,
    offload: OffloadConfig = NO_OFFLOAD,
) -> Result:
    data = Mesh.create(tensor_size=1, shard_size=shard_size).data
    model = ZeroDataParallel(build(name, checkpoints, dtype), data, config, offload=offload)
    settings = {"lr": LR, "weight_decay": WEIGHT_DECAY, "eps": EPS[dtype], "fused": True}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, clip_norm=CLIP_NORM, **settings)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        total = torch.zeros((), dtype=dtype)

        def backward(micro_batch: int, step: int = step, total: Tensor = total) -> None:
            loss = loss_of(model, batch(step, micro_batch, data.rank)) / num_micro_batches
            loss.backward()
            total += loss.detach() / data.size

        with model.accumulate():
            for micro_batch in range(num_micro_batches - 1):
                backward(micro_batch)
        backward(num_micro_batches - 1)
        norms.append(optimizer.step().item())
        dist.all_reduce(total)
        losses.append(total.item())
    return Result(losses, norms, params_of(model))


FACTORS = {
    "name": list(MODELS),
    "stage": [0, 1, 2, 3],
    "data_size": [1, 2, 4],
    "num_micro_batches": [1, 3],
    "checkpoints": [False, True],
    "overlap": [True, False],
    "overlap_gather": [False, True],
    "bucket_numel": [500, None],
    "dtype": [torch.float64, torch.float32],
}


def assert_equals_one_process(
    name: str,
    data_size: int,
    num_micro_batches: int,
    checkpoints: bool = False,
    dtype: torch.dtype = torch.float64,
    shard_size: int | None = None,
    **settings: Any,
) -> None:
    config = ZeroConfig(**settings)
    shard_size = min(shard_size, data_size) if shard_size else None
    found = run_ranks(data_size, train_with_zero, name, config, num_micro_batches, checkpoints, dtype, shard_size)
    expected = train_in_one_process(name, data_size, num_micro_batches, dtype)
    for rank, result in enumerate(found):
        assert result.distance(expected) < TOLERANCE[dtype], f"rank {rank}"


@pytest.mark.parametrize("combination", pairwise(**FACTORS), ids=lambda c: "-".join(map(str, c.values())))
def test_stages_equal_one_process(combination):
    assert_equals_one_process(**combination)


@pytest.mark.full
@pytest.mark.parametrize(
    "combination",
    product_of(FACTORS, "name", "stage", "data_size", "num_micro_batches", "overlap"),
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_all_models_and_stages_equal_one_process(combination):
    assert_equals_one_process(**combination, bucket_numel=500, overlap_gather=combination["overlap"])


FACTORS_OF_PARTITIONED_PARAMETERS = {
    "name": [*MODELS, *HARDER_MODELS],
    "data_size": [1, 2, 4],
    "num_micro_batches": [1, 3],
    "checkpoints": [False, True],
    "overlap": [True, False],
    "prefetch_numel": [0, 4000, 10**9],
    "resident_numel": [0, 100],
    "accumulate": ["reduce", "local"],
    "shard_size": [None, 1, 2],
    "defragment": [True, False],
}


@pytest.mark.parametrize(
    "combination", pairwise(**FACTORS_OF_PARTITIONED_PARAMETERS), ids=lambda c: "-".join(map(str, c.values()))
)
def test_partitioned_parameters_equal_one_process(combination):
    assert_equals_one_process(**combination, stage=3, bucket_numel=500)


@pytest.mark.full
@pytest.mark.parametrize(
    "combination",
    product_of(
        FACTORS_OF_PARTITIONED_PARAMETERS, "name", "data_size", "num_micro_batches", "overlap", "prefetch_numel"
    ),
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_all_models_with_partitioned_parameters_equal_one_process(combination):
    assert_equals_one_process(**combination, stage=3, bucket_numel=500)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharding_inside_groups_and_replicating_across_equals_one_process(stage):
    assert_equals_one_process("toy", 4, 1, shard_size=2, stage=stage, bucket_numel=500)
