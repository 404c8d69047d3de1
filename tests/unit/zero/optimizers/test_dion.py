"""Dion of whole parameters against the formulas of its paper, at full rank, and of matrices that lack a part."""

import math

import pytest
import torch
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.engine import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.optimizers.dion import Dion
from zero.partition.config import ZeroConfig
from zero.state.checkpoint import load, save

LR, MOMENTUM = 0.1, 0.8
SETTINGS = {"lr": LR, "momentum": MOMENTUM, "weight_decay": 0.0, "dtype": "fp64"}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(optimizer: Dion, param: nn.Parameter, grad: Tensor) -> Tensor:
    """Return the update of a step: P Q^T."""
    before = param.detach().clone()
    param.grad = grad.clone()
    optimizer.step()
    return (before - param.detach()) / (LR * math.sqrt(len(param) / param.shape[1]))


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_a_step_has_the_formulas_of_the_paper(shape):
    param = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = Dion([param], rank_fraction=0.5, **SETTINGS)
    right = optimizer.matrix_state(shape, param.device)["right_factor"]
    assert right.shape == (shape[1], 3)
    momentum = torch.zeros_like(param)
    for number in range(4):
        grad = random(*shape, seed=number)
        buffer = momentum + grad
        left = torch.linalg.qr(buffer @ right)[0]
        product = buffer.T @ left
        right = product / product.norm(dim=0)
        momentum = buffer - (1 - MOMENTUM) * left @ product.T
        torch.testing.assert_close(step(optimizer, param, grad), left @ right.T, rtol=0, atol=1e-13)
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], momentum, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (6, 6)])
def test_at_full_rank_the_update_becomes_the_orthonormal_factor_of_the_momentum(shape):
    """P R^T is then all of B, so the momentum is that of Muon; a constant gradient lets the power iteration converge.

    Each singular value is a quarter of the one before: 40 steps leave 4^-40 of the first error.
    """
    left, right = (torch.linalg.qr(random(n, 6, seed=n)).Q for n in shape)
    grad = left * 0.25 ** torch.arange(6) @ right.T
    param = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = Dion([param], rank_fraction=1.0, **SETTINGS)
    momentum = torch.zeros_like(grad)
    for _ in range(40):
        update = step(optimizer, param, grad)
        momentum = MOMENTUM * (momentum + grad)
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], momentum, rtol=0, atol=1e-13)
    torch.testing.assert_close(update, left @ right.T, rtol=0, atol=1e-11)


def test_directions_that_a_matrix_lacks_have_no_update():
    """Rounding leaves 1e-16 in them, of which a length of 1 would be made. They return when a gradient has them."""
    param = nn.Parameter(torch.zeros(6, 8, dtype=torch.float64))
    optimizer = Dion([param], rank_fraction=1.0, **SETTINGS)
    assert not step(optimizer, param, torch.zeros_like(param)).any()
    column, row = random(6, 1), random(1, 8, seed=1)
    unit = column @ row / (column.norm() * row.norm())
    torch.testing.assert_close(step(optimizer, param, column @ row), unit, rtol=0, atol=1e-13)
    assert torch.linalg.matrix_rank(step(optimizer, param, random(6, 8, seed=2)), atol=1e-3) == 6


def test_settings_out_of_range_are_refused():
    for settings, message in (
        ({"rank_fraction": 0}, "rank_fraction=0 of Dion is not above 0"),
        ({"rank_fraction": 2.0}, "rank_fraction=2.0 of Dion"),
    ):
        with pytest.raises(ValueError, match=message):
            Dion([nn.Parameter(torch.zeros(2, 2))], **settings)


class Layer(nn.Module):
    """A linear layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()


def start(summed: str = "message", **settings) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    model = ZeroDataParallel(Layer(), Axis.trivial("data"), ZeroConfig(1, sum_over_ranks=summed))
    return model, ZeroOptimizer(model, Dion, lr=LR, **settings)


def test_bits_that_do_not_depend_on_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"the bits of Dion depend .*ZeroConfig.sum_over_ranks=leaves"):
        start("leaves")


def test_a_checkpoint_of_another_rank_names_the_setting(tmp_path):
    model, optimizer = start(rank_fraction=0.5)
    save(tmp_path, model, optimizer)
    wanted = r"right_factor' is \[8, 4\] there and \[8, 2\] in this run; resume with the settings .*Dion.rank_fraction"
    with pytest.raises(ConfigError, match=wanted):
        load(tmp_path, *start(rank_fraction=0.25))
