"""Several optimizers over one model, each with parameters of its own, step as they do in one process."""

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.comm_log import CommLog
from parallel.mesh import Axis
from parallel.tensor.gradient_sums import GradientSums
from parallel.validation.errors import ConfigError
from tests.scenarios import STAGES, WIDTH, Block, Blocks, Run, as_test, cases, mean_square
from tests.twins import params_of
from zero.core.step.loss_scale import LossScale
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig

# What to do one after the other: a letter is the first one of a method or of an optimizer. b: backward of the next
# batch; a: the same inside `accumulate`; sm: the optimizer of the matrices steps; zv: that of the vectors discards its
# gradients; z: all gradients are discarded.
SCRIPT = """
b sm sv  b sv sm
b sm zv  b sv zm
b sm  b sm  a b sm sv  b sv zm
b z  b sm zv  b zv  a sm sv
a zv  b sm sv
"""  # both step; they alternate, as in a GAN; gradients of the one that waits add up; gradients are discarded


def optimizers_of_disjoint_parameters(run: Run) -> None:
    """Their parameters alternate: most share a bucket with one of the other optimizer. One bias is in neither."""
    model = run.wrap(Blocks())
    params = [param for name, param in model.module.named_parameters() if name != "head.bias"]
    matrices, vectors = ([{"params": [p for p in params if (p.dim() > 1) is m]}] for m in (True, False))
    optimizers = {
        "m": run.optimizer(model, groups=matrices, clip_norm=0.5),
        "v": run.optimizer(model, torch.optim.AdamW, vectors, clip_norm=0.01),
    }
    batches = itertools.count()
    for command in SCRIPT.split():
        action, chosen = command[0], [optimizers[name] for name in command[1:]]
        if action in "ab":
            with model.accumulate() if action == "a" else nullcontext():
                run.record(mean_square(model, run.batch(next(batches)))).backward()
        for optimizer in chosen:
            if action == "s":
                run.record(optimizer.step())
            optimizer.zero_grad()
        if command == "z":
            model.zero_grad()


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.ModuleList([Block(), Block()])
        self.discriminator = nn.ModuleList([Block(), nn.Linear(WIDTH, 1)])

    def forward(self, x: Tensor, discriminates: bool) -> Tensor:
        for block in self.discriminator if discriminates else self.generator:
            x = block(x)
        return x


def one_half_is_frozen_while_the_other_steps(run: Run) -> None:
    """Lightning's `toggle_optimizer`."""
    model = run.wrap(Gan())
    parts = model.module.generator, model.module.discriminator
    optimizers = [run.optimizer(model, groups=[{"params": list(part.parameters())}]) for part in parts]
    for step in range(4):
        this, other = parts[step % 2], parts[1 - step % 2]
        other.requires_grad_(False)
        optimizers[step % 2].zero_grad()
        run.record(nn.functional.softplus(-model(model(run.batch(step), False), True)).mean()).backward()
        optimizers[step % 2].step()
        other.requires_grad_(True)
        assert all(param.requires_grad for param in this.parameters())


TABLE = {
    "several-optimizers": cases(optimizers_of_disjoint_parameters, few=STAGES)
    | cases(one_half_is_frozen_while_the_other_steps)
}

test_scenario = as_test(__name__, TABLE)


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


def test_optimizers_with_other_tensor_axes_are_refused():
    """The one with an axis would switch off the sums in backward, on which the other one relies."""
    model, tensor = one_rank_engine(), Axis("tensor", 2, 0, CommLog())
    model.module.sums = sums = GradientSums([model.module[0].bias], tensor)
    first = ZeroOptimizer(model, torch.optim.SGD, groups_of(model, 0))
    with pytest.raises(ConfigError, match=r"`tensor` axes of their own, of 1 and 2 ranks"):
        ZeroOptimizer(model, torch.optim.SGD, groups_of(model, 1), tensor=tensor)
    assert not sums.is_deferred
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
