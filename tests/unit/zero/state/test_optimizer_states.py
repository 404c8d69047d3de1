"""Other optimizers than torch's Adam resume: with counters of groups, and moments of another type than the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel.mesh import Axis
from zero import ZeroConfig, ZeroDataParallel, ZeroOptimizer, load, save


class CountingMomentum(torch.optim.Optimizer):
    """Momentum in bfloat16, whose rate falls with a number of steps that it counts for each group."""

    def __init__(self, params: Any, lr: float = 0.1, rate: float = 0.5):
        super().__init__(params, {"lr": lr, "rate": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["exp_avg"].mul_(group["rate"]).add_(param.grad.bfloat16())
                state["exp_avg_sq"].lerp_(param.grad, 0.1)
                param -= group["lr"] / group["num_steps"] * (state["exp_avg"].to(param.dtype) + state["exp_avg_sq"])


Wrapped = tuple[ZeroDataParallel, ZeroOptimizer]


def wrap_module(dtype: torch.dtype = torch.float32) -> ZeroDataParallel:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    return ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1, bucket_numel=40))


def wrap(dtype: torch.dtype = torch.float32) -> Wrapped:
    model = wrap_module(dtype)
    module = model.module
    matrices, rest = [[p for p in module.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    groups = [{"params": matrices, "rate": 0.9}, {"params": rest, "rate": 0.25}]
    return model, ZeroOptimizer(model, CountingMomentum, groups)


def train(wrapped: Wrapped, steps: range) -> list[float]:
    model, optimizer = wrapped
    dtype, losses = next(model.module.parameters()).dtype, []
    for step in steps:
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resumed(folder: Path, saved: Wrapped, into: Wrapped) -> Wrapped:
    """Load into one pair what the other has saved."""
    load(save(folder / "saved", *saved), *into)
    return into


def test_counters_of_groups_and_moments_of_another_type_resume_to_the_bit(tmp_path: Path):
    undisturbed, interrupted = wrap(), wrap()
    expected = train(undisturbed, range(6))
    losses = train(interrupted, range(3))
    continued = resumed(tmp_path, interrupted, wrap())
    assert [group["num_steps"] for group in continued[1].inner.param_groups] == [3, 3]
    assert [losses, train(continued, range(3, 6))] == [expected[:3], expected[3:]]


def test_the_third_moment_of_amsgrad_resumes_to_the_bit(tmp_path: Path):
    def wrap_amsgrad() -> Wrapped:
        model = wrap_module()
        return model, ZeroOptimizer(model, torch.optim.AdamW, lr=0.1, amsgrad=True)

    expected = train(wrap_amsgrad(), range(6))
    interrupted = wrap_amsgrad()
    train(interrupted, range(3))
    assert train(resumed(tmp_path, interrupted, wrap_amsgrad()), range(3, 6)) == expected[3:]


def test_only_states_of_the_type_of_the_weights_take_that_of_the_weights_they_are_loaded_for(tmp_path: Path):
    interrupted = wrap()
    losses = train(interrupted, range(6))[3:]
    again = wrap()
    train(again, range(3))
    wide = resumed(tmp_path, again, wrap(torch.float64))
    types = {kind: tensor.dtype for state in wide[1].inner.state.values() for kind, tensor in state.items()}
    assert types == {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float64}
    assert train(wide, range(3, 6)) == pytest.approx(losses, rel=1e-5)  # rounding of float32
