"""An optimizer whose granularity is a row, as somebody outside of zero would write it, trains as in one process."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.distributed.zero.optimizers.test_muon import (
    TOLERANCE,
    Case,
    plain_updates,
    start,
    train_plain,
    train_steps,
    whole_params,
)
from tests.ranks import run_cases
from zero.settings.config import OffloadConfig
from zero.updates.matrix_method import View
from zero.updates.matrix_optimizer import MatrixOptimizer

BETA, EPS, NUM_STEPS = 0.9, 1e-8, 3


class RowNormalized(MatrixOptimizer):
    """Momentum of which each row is divided by the root of its mean square."""

    own_defaults: ClassVar = {"beta": BETA, "lr_factor": 1.0, "joins_parts": True}
    message_dtype = torch.float64

    def prepare(self, param: nn.Parameter) -> None:
        if not self.state[param]:
            self.state[param]["momentum"] = torch.zeros_like(param)

    def direction(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any], view: View, out: Tensor) -> None:
        own, momentum = view(grad), view(self.state[param]["momentum"])
        self.clear_if_skipped(own)
        momentum.lerp_(own, self.if_kept(1 - group["beta"], own.dtype))
        out.copy_(momentum)

    def transform(self, matrices: Tensor, group: dict[str, Any], states: Sequence[dict[str, Tensor]]) -> None:
        matrices.div_(matrices.square().mean(2, keepdim=True).sqrt() + EPS)
        if (is_kept := self.is_kept(matrices)) is not None:
            matrices.mul_(is_kept)

    @staticmethod
    def flops(shape: tuple[int, int], group: dict[str, Any]) -> int:
        return shape[0] * shape[1]


class Plain:
    """The momentum of one matrix, from the definition."""

    def __init__(self, shape: torch.Size):
        self.momentum = torch.zeros(shape)

    def update(self, grad: Tensor) -> Tensor:
        self.momentum = BETA * self.momentum + (1 - BETA) * grad
        return self.momentum / (self.momentum.square().mean(1, keepdim=True).sqrt() + EPS)


def train(case: Case) -> dict[str, Tensor]:
    model, optimizer = start(case, kind=RowNormalized)
    train_steps(model, optimizer, case.num_micro_batches, range(NUM_STEPS))
    return whole_params(model, optimizer.tensor)


def test_an_optimizer_of_rows_equals_one_process():
    expected = train_plain(plain_updates(Plain), NUM_STEPS)
    host = OffloadConfig("host")
    cases = [Case(0, 2), Case(1, 2, bucket_numel=900), Case(2, 1, 2, num_micro_batches=2), Case(3, 2, offload=host)]
    for found in run_cases(2, train, [[case] for case in cases]):
        for params in found:
            torch.testing.assert_close(params, expected, rtol=0, atol=TOLERANCE)
