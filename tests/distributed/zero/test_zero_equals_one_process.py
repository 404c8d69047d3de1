"""Every stage trains as one process does: losses, gradient norms and parameters after 3 AdamW steps."""

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Mesh
from tests.models import HARDER_MODELS, MODELS, batch, build, loss_of
from tests.pairwise import pairwise
from tests.ranks import run_cases
from tests.twins import params_of
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig

NUM_STEPS, CLIP_NORM, LR, WEIGHT_DECAY = 3, 0.5, 1e-2, 0.1

# float64: rounding is about 1e-16 and Adam divides by at least eps, so a difference above 1e-10 is a mistake.
# float32: a gradient is a sum of rounded terms; allow 64 roundings of 2**-24 on gradients that are clipped to 0.5.
# A step moves a parameter by lr * grad / (|grad| + eps) at most, so an error in the gradient grows by lr / eps.
EPS = {torch.float64: 1e-8, torch.float32: 0.1, torch.bfloat16: 1e-8}
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


@dataclass(frozen=True)
class Case:
    name: str
    zero: ZeroConfig
    num_micro_batches: int = 1
    sizes: tuple[int, int | None] = (2, None)  # of the data axis, and of its shard groups
    checkpoints: bool = False
    dtype: torch.dtype = torch.float64
    offload: OffloadConfig = NO_OFFLOAD
    clip_norm: float | None = CLIP_NORM


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


def train_with_zero(case: Case) -> Result:
    num_micro_batches, dtype = case.num_micro_batches, case.dtype
    data = Mesh.create(tensor_size=1, shard_size=case.sizes[1]).data
    model = ZeroDataParallel(build(case.name, case.checkpoints, dtype), data, case.zero, offload=case.offload)
    settings = {"lr": LR, "weight_decay": WEIGHT_DECAY, "eps": EPS[dtype], "fused": True}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, clip_norm=case.clip_norm, **settings)
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


def case_of(**combination: Any) -> Case:
    """Return the case with these values: those that are no field of it are settings of ZeRO."""
    of_case = {key: combination.pop(key) for key in Case.__dataclass_fields__ if key in combination}
    return Case(zero=ZeroConfig(**combination), **of_case)


def assert_equal_one_process(cases: list[Case]) -> None:
    for data_size in sorted({case.sizes[0] for case in cases}):
        chosen = [case for case in cases if case.sizes[0] == data_size]
        for case, results in zip(chosen, run_cases(data_size, train_with_zero, [[c] for c in chosen]), strict=True):
            expected = train_in_one_process(case.name, data_size, case.num_micro_batches, case.dtype)
            for rank, result in enumerate(results):
                assert result.distance(expected) < TOLERANCE[case.dtype], f"rank {rank} of {case}"


FACTORS = {
    "name": list(MODELS),
    "stage": [0, 1, 2, 3],
    "sizes": [(1, None), (2, None)],
    "num_micro_batches": [1, 3],
    "checkpoints": [False, True],
    "overlap": [True, False],
    "overlap_gather": [False, True],
    "bucket_numel": [3000, None],
    "dtype": [torch.float64, torch.float32],
}


def test_stages_equal_one_process():
    assert_equal_one_process([case_of(**combination) for combination in pairwise(**FACTORS)])


FACTORS_OF_PARTITIONED_PARAMETERS = {
    "name": [*MODELS, *HARDER_MODELS],
    "stage": [3],
    "bucket_numel": [3000],
    "sizes": [(2, None), (2, 1)],
    "num_micro_batches": [1, 3],
    "checkpoints": [False, True],
    "overlap": [True, False],
    "prefetch_numel": [0, 4000, 10**9],
    "resident_numel": [0, 100],
    "accumulate": ["reduce", "local"],
    "defragment": [True, False],
}


def test_partitioned_parameters_equal_one_process():
    """The models take turns with pairs of the settings."""
    names = itertools.cycle(FACTORS_OF_PARTITIONED_PARAMETERS["name"])
    settings = {key: values for key, values in FACTORS_OF_PARTITIONED_PARAMETERS.items() if key != "name"}
    assert_equal_one_process([case_of(name=next(names), **chosen) for chosen in pairwise(**settings)])
