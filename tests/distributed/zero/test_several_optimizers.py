"""Several optimizers over one model, each with parameters of its own, step as they do in one process."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from parallel.errors import ConfigError
from parallel.mesh import Axis, Mesh
from tests.models import build
from tests.ranks import run_ranks
from tests.twins import ALL_STAGES, configs, next_token_loss, params_of
from zero.engine import ZeroDataParallel
from zero.memory.placement import NO_OFFLOAD, OffloadConfig
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig
from zero.state.owned_state import owned_state
from zero.step.loss_scale import LossScale

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], float]] = {
    "matrices": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, 0.5),
    "vectors": (torch.optim.AdamW, {"lr": 1e-2}, 0.01),
}


def params_by_optimizer(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return alternating parameters: most share a bucket with one of the other optimizer. One bias is in neither."""
    params = [param for name, param in module.named_parameters() if name != "bias" and param.requires_grad]
    return {
        "matrices": [param for param in params if param.dim() > 1],
        "vectors": [param for param in params if param.dim() < 2],
    }


class PlainOptimizers:
    """A model in plain torch with both optimizers. A step clips the gradients of its parameters, and discards them."""

    def __init__(self, module: nn.Module, num_ranks: int):
        self.module, self.num_ranks = copy.deepcopy(module), num_ranks
        self.params = params_by_optimizer(self.module)
        self.optimizers = {name: kind(self.params[name], **settings) for name, (kind, settings, _) in KINDS.items()}

    def backward(self, step: int) -> None:
        for rank in range(self.num_ranks):
            (next_token_loss(self.module, step, rank) / self.num_ranks).backward()

    def step(self, name: str) -> torch.Tensor:
        for param in self.params[name]:  # an unused parameter counts as one with gradient zero
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        norm = torch.nn.utils.clip_grad_norm_(self.params[name], KINDS[name][2])
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()
        return norm


# What to do one after the other: a letter is the first one of a method or of an optimizer. b: backward of the next
# batch; a: the same inside `accumulate`; sm: the optimizer of the matrices steps; zv: that of the vectors discards its
# gradients; z: all gradients are discarded.
SCRIPT = """
b sm sv  b sv sm
b sm zv  b sv zm
b sm  b sm  a b sm sv  b sv zm
b z  b sm zv  b zv  a sm sv
"""  # both step; they alternate, as in a GAN; gradients of the one that waits add up; gradients are discarded


def check_script(config: ZeroConfig, offload: OffloadConfig) -> None:
    data = Mesh.create(tensor_size=1).data
    module = build("toy")
    plain = PlainOptimizers(module, data.size)
    model = ZeroDataParallel(module, data, config, offload=offload)
    optimizers = {
        name: ZeroOptimizer(model, KINDS[name][0], [{"params": params}], clip_norm=KINDS[name][2], **KINDS[name][1])
        for name, params in params_by_optimizer(module).items()
    }
    batches = itertools.count()
    for command in SCRIPT.split():
        name = next((name for name in optimizers if name[0] == command[1:]), "")
        if command[0] in "ab":
            batch = next(batches)
            plain.backward(batch)
            if command == "a":
                with model.accumulate():
                    next_token_loss(model, batch, data.rank).backward()
            else:
                next_token_loss(model, batch, data.rank).backward()
        elif command[0] == "s":
            norm, expected_norm = optimizers[name].step(), plain.step(name)
            torch.testing.assert_close(norm, expected_norm, rtol=1e-10, atol=1e-10)
            expected = dict(plain.module.named_parameters())
            torch.testing.assert_close(params_of(model), expected, rtol=1e-10, atol=1e-10)
        elif name:
            optimizers[name].zero_grad()
            plain.optimizers[name].zero_grad()
        else:
            model.reducer.clear()
            plain.module.zero_grad()
    assert owned_state(model, optimizers["matrices"]).keys() != owned_state(model, optimizers["vectors"]).keys()


def check_cases(cases: list[tuple[ZeroConfig, OffloadConfig]]) -> None:
    for config, offload in cases:
        check_script(config, offload)


CASES = [
    *((config, NO_OFFLOAD) for config in configs(*ALL_STAGES, bucket_numel=[3000])),
    (ZeroConfig(3, 3000, accumulate="local"), NO_OFFLOAD),
    (ZeroConfig(1, 3000), OffloadConfig("host", ("optimizer",))),
]


def test_optimizers_of_disjoint_parameters_equal_one_process():
    run_ranks(2, check_cases, CASES)


def two_linear_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def one_rank_engine(offload: OffloadConfig = NO_OFFLOAD) -> ZeroDataParallel:
    return ZeroDataParallel(two_linear_layers(), Axis.trivial("data"), ZeroConfig(2), offload=offload)


def groups_of(model: ZeroDataParallel, layer: int) -> list[dict[str, Any]]:
    return [{"params": list(model.module[layer].parameters())}]


def test_a_parameter_in_two_optimizers_is_refused_until_one_is_deleted():
    model = one_rank_engine()
    first = ZeroOptimizer(model, torch.optim.SGD, groups_of(model, 0))
    with pytest.raises(ValueError, match="is in two optimizers of this model"):
        ZeroOptimizer(model, torch.optim.SGD)
    second = ZeroOptimizer(model, torch.optim.SGD, groups_of(model, 1))
    del first
    third = ZeroOptimizer(model, torch.optim.SGD, groups_of(model, 0), lr=0.1)
    before = params_of(model)
    model(torch.randn(3, 4)).sum().backward()
    for optimizer in (second, third):
        assert optimizer.step() > 0
    assert all(not before[name].equal(param) for name, param in params_of(model).items())


def test_optimizers_that_move_buckets_are_refused():
    model = one_rank_engine(OffloadConfig("auto", accelerator_memory_gb=1.0, min_chunk_size_m=1e-3))
    first = ZeroOptimizer(model, torch.optim.SGD, groups_of(model, 0))
    with pytest.raises(ConfigError, match=r"OffloadConfig\.mode=auto moves buckets for one optimizer"):
        ZeroOptimizer(model, torch.optim.SGD, groups_of(model, 1))
    del first


@pytest.mark.parametrize("other", [None, LossScale(8.0), LossScale(8.0, is_dynamic=True)])
def test_optimizers_with_loss_scales_of_their_own_are_refused(other):
    model = one_rank_engine()
    first = ZeroOptimizer(model, torch.optim.SGD, groups_of(model, 0), loss_scale=LossScale(8.0, is_dynamic=True))
    with pytest.raises(ValueError, match="give both the same LossScale"):
        ZeroOptimizer(model, torch.optim.SGD, groups_of(model, 1), loss_scale=other)
    del first


def test_a_shared_loss_scale_changes_once_both_have_stepped():
    model, scale = one_rank_engine(), LossScale(8.0, is_dynamic=True, hysteresis=1)
    optimizers = [
        ZeroOptimizer(model, torch.optim.SGD, groups_of(model, layer), loss_scale=scale, lr=1e-3) for layer in (0, 1)
    ]
    model.module[0].weight.register_hook(lambda grad: grad * math.inf)
    (model(torch.ones(3, 4)).sum() * scale.scale).backward()
    assert not optimizers[0].step().isfinite()
    assert scale.scale == 8.0  # by which the gradients of the other one are still multiplied
    assert optimizers[1].step().isfinite()
    assert scale.scale == 4.0
    assert [optimizer.num_skipped.item() for optimizer in optimizers] == [1, 0]
