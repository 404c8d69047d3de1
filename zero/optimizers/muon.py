"""Muon: momentum whose matrices are made orthogonal by a Newton-Schulz iteration (Jordan et al., 2024)."""

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from zero.optimizers.matrix_optimizer import MatrixOptimizer
from zero.partition.config import DTYPES

Adjustment = Literal["original", "match_rms_adamw"]
ITERATION_DTYPES = {"bf16": DTYPES["bf16"], "fp32": DTYPES["fp32"], "fp64": torch.float64}


class Muon(MatrixOptimizer):
    """Muon for groups of matrices, with the arithmetic of `torch.optim.Muon`, and AdamW for groups with update="adamw".

    The names of Muon's settings are torch's. `lr_factor` multiplies the learning rate of matrices, `ns_eps` is torch's
    eps, and `ns_dtype` the type of the Newton-Schulz iteration, and of the messages: bf16, fp32 or fp64. The default
    `adjust_lr_fn`, match_rms_adamw, gives an update the size of AdamW's, so that both can have one learning rate.
    """

    method = "muon"
    own_defaults: ClassVar = {
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "ns_eps": 1e-7,
        "ns_steps": 5,
        "ns_dtype": "bf16",
        "adjust_lr_fn": "match_rms_adamw",
        "lr_factor": 1.0,
        "joins_parts": True,
    }

    @property
    def message_dtype(self) -> torch.dtype:
        """The data type of the iteration, to which directions would be rounded anyway."""
        return ITERATION_DTYPES[self.defaults["ns_dtype"]]

    def prepare(self, param: nn.Parameter) -> None:
        """Make the momentum of a stretch."""
        if not self.state[param]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    def direction(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum of a stretch, and return the direction that is made orthogonal."""
        momentum, buffer = group["momentum"], self.state[param]["momentum_buffer"]
        if (is_kept := self.is_kept(buffer)) is None:
            buffer.lerp_(grad, 1 - momentum)
        else:
            grad.masked_fill_(is_kept == 0, 0.0)  # times a weight of zero, inf would be NaN
            buffer.lerp_(grad, is_kept * (1 - momentum))
        return grad.lerp(buffer, momentum) if group["nesterov"] else buffer

    def transform(self, matrix: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> Tensor:
        """Return the nearly orthogonal matrix."""
        return orthogonalized(matrix, group["ns_coefficients"], group["ns_steps"], group["ns_eps"])

    def rate(self, group: dict[str, Any], shape: tuple[int, int] | None) -> float:
        """Return the learning rate, which is adjusted to the shape of a matrix."""
        factor = 1.0 if shape is None else adjustment(group["adjust_lr_fn"], shape)
        return super().rate(group, shape) * factor

    @staticmethod
    def flops(shape: tuple[int, int]) -> int:
        """Return half the FLOPs of a step of the iteration: m m n for the Gram matrix, m m m, and m m n."""
        m, n = min(shape), max(shape)
        return 2 * m * m * n + m**3


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Return a matrix of the same singular vectors, with singular values near 1.

    The iteration (quintic, of the odd polynomial with `coefficients`) runs in the matrix's type, with the operations of
    `torch.optim.Muon` in the same order.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def adjustment(name: Adjustment | None, shape: tuple[int, int]) -> float:
    """Return the factor of the learning rate of a matrix, as in `torch.optim.Muon`.

    original: sqrt(max(1, rows / columns)); match_rms_adamw: 0.2 sqrt(max(rows, columns)).
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if name == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
