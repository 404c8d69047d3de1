"""A model under ZeRO and its copy in plain torch, trained side by side on the batches of all ranks."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallel.mesh import Mesh
from tests.models import batch, loss_of
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

Loss = Callable[[nn.Module, int, int], Tensor]  # (module, step, rank) -> loss
Groups = Callable[[nn.Module], list[dict[str, Any]]]
Check = Callable[[ZeroConfig], None]

ALL_STAGES = [0, 1, 2, 3]


def next_token_loss(module: nn.Module, step: int, rank: int) -> Tensor:
    return loss_of(module, batch(step, 0, rank))


def all_params(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(module.parameters())}]


class Twins:
    """Two models that are trained alike: `model` with `optimizer`, and `plain` with `plain_optimizer`."""

    def __init__(
        self,
        module: nn.Module,
        config: ZeroConfig,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        groups: Groups = all_params,
        clip_norm: float | None = 1e6,
        **settings: Any,
    ):
        self.data = Mesh.create(tensor_size=1).data
        self.clip_norm = math.inf if clip_norm is None else clip_norm
        self.plain = copy.deepcopy(module)
        self.plain_optimizer = optimizer(groups(self.plain), **settings)
        self.model = ZeroDataParallel(module, self.data, config)
        self.optimizer = ZeroOptimizer(self.model, optimizer, groups(module), clip_norm=clip_norm, **settings)

    def backward(self, step: int, loss: Loss = next_token_loss) -> None:
        loss(self.model, step, self.data.rank).backward()
        self.plain_backward(step, loss)

    def plain_backward(self, step: int, loss: Loss = next_token_loss) -> None:
        for rank in range(self.data.size):
            (loss(self.plain, step, rank) / self.data.size).backward()

    def step(self, tolerance: float = 1e-10) -> None:
        """Update both, and assert that gradient norms and updated parameters are the same."""
        norm = self.optimizer.step()
        for param in self.plain.parameters():  # a parameter that no rank used has a gradient of zero
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        clipped = [param for group in self.plain_optimizer.param_groups for param in group["params"]]
        expected_norm = torch.nn.utils.clip_grad_norm_(clipped, self.clip_norm)
        torch.testing.assert_close(norm, expected_norm.to(norm.dtype), rtol=tolerance, atol=tolerance)
        self.plain_optimizer.step()
        self.plain.zero_grad()
        self.assert_alike(tolerance)

    def assert_alike(self, tolerance: float = 1e-10) -> None:
        found, expected = params_of(self.model), dict(self.plain.named_parameters())
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    def train(self, num_steps: int, first: int = 0) -> None:
        for step in range(first, first + num_steps):
            self.backward(step)
            self.step()


def params_of(model: ZeroDataParallel) -> dict[str, Tensor]:
    """Return a copy of all parameters."""
    with model.gathered() as module:
        return {name: param.detach().clone() for name, param in module.named_parameters()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def configs(*stages: int, **factors: list[Any]) -> list[ZeroConfig]:
    """Return every combination of the settings, with buckets smaller than the largest parameter."""
    factors = {"bucket_numel": [2500]} | factors
    return [
        ZeroConfig(stage, **dict(zip(factors, values, strict=True)))
        for stage, *values in itertools.product(stages, *factors.values())
    ]


def check_all(checks: list[Check], zero_configs: list[ZeroConfig]) -> None:
    """Run all checks under all configurations, on every rank, so that the ranks start only once."""
    for check, config in itertools.product(checks, zero_configs):
        torch.manual_seed(0)
        check(config)
