"""Muon: momentum whose matrices are made orthogonal by a Newton-Schulz iteration (Jordan et al., 2024)."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from zero.optimizers.matrix_method import View
from zero.optimizers.matrix_optimizer import MatrixOptimizer
from zero.partition.config import DTYPES

Coefficients = tuple[float, float, float]
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

    def accumulate(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Update the momentum."""
        self.clear_if_skipped(grad)
        self.state[param]["momentum_buffer"].lerp_(grad, self.if_kept(1 - group["momentum"], grad.dtype))

    def direction(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any], view: View, out: Tensor) -> None:
        """Write the direction that is made orthogonal."""
        buffer = view(self.state[param]["momentum_buffer"])
        if group["nesterov"]:
            torch.lerp(view(grad), buffer, group["momentum"], out=out)  # rounded to the type of `out` once
        else:
            out.copy_(buffer)

    def transform(self, matrices: Tensor, group: dict[str, Any], states: Sequence[dict[str, Tensor]]) -> None:
        """Make the matrices nearly orthogonal."""
        coefficients, eps = [group["ns_coefficients"]] * group["ns_steps"], group["ns_eps"]
        orthogonalize_(matrices, coefficients, eps, self.if_kept(1.0, matrices.dtype))

    def rate(self, group: dict[str, Any], shape: tuple[int, int] | None) -> float:
        """Return the learning rate, which is adjusted to the shape of a matrix."""
        factor = 1.0 if shape is None else adjustment(group["adjust_lr_fn"], shape)
        return super().rate(group, shape) * factor

    @staticmethod
    def flops(shape: tuple[int, int]) -> int:
        """Return half the FLOPs of a step of the iteration: m m n for the Gram matrix, m m m, and m m n."""
        m, n = min(shape), max(shape)
        return 2 * m * m * n + m**3


def orthogonalize_(
    matrices: Tensor, coefficients: Sequence[Coefficients], eps: float, is_kept: Tensor | float = 1.0
) -> None:
    """Overwrite matrices (number, rows, columns) by ones of the same singular vectors, with singular values near 1.

    The iteration (quintic, a step for each odd polynomial of `coefficients`) runs in the matrices' type, with the
    operations of `torch.optim.Muon` in the same order. The result is 0 if `is_kept` is.
    """
    is_tall = matrices.size(1) > matrices.size(2)
    out = matrices.mT if is_tall else matrices
    norms = torch.linalg.vector_norm(out, dim=(1, 2), keepdim=True).clamp(min=eps)
    x = out / (norms / is_kept)
    for a, b, c in coefficients:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    out.copy_(x)


def adjustment(name: Adjustment | None, shape: tuple[int, int]) -> float:
    """Return the factor of the learning rate of a matrix, as in `torch.optim.Muon`.

    original: sqrt(max(1, rows / columns)); match_rms_adamw: 0.2 sqrt(max(rows, columns)).
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if name == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
