"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al., 2024)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zero.updates.matrix_method import WIDE_DTYPES, View
from zero.updates.matrix_optimizer import MatrixOptimizer

SHIFT = 1e-3  # of the mean eigenvalue, added to all: so a singular preconditioner has a basis that is not arbitrary


class Soap(MatrixOptimizer):
    """SOAP for parameters that are matrices.

    Its states belong to whole matrices: both moments, a preconditioner of each side, and its eigenbasis. Their
    memory, 2 (m n + m m + n n) numbers for a matrix of m x n, is on the rank that computes the matrix. Every
    `refresh_every` steps the bases take a step of the power iteration, with a QR decomposition; they begin as the unit
    matrix. If that step is skipped, they stay until the next refresh: the host counts the steps, and does not wait to
    learn which ones are skipped. `betas` and `eps` are Adam's, `shampoo_beta` the decay of the preconditioners, and
    `dtype` (fp32 or fp64) the type of the states, the computation and the messages.
    """

    own_defaults: ClassVar = {
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "shampoo_beta": 0.95,
        "refresh_every": 10,
        "dtype": "fp32",
        "lr_factor": 1.0,
        "joins_parts": True,
    }
    own_choices: ClassVar = {"dtype": WIDE_DTYPES}
    own_counters = ("num_rounds",)
    common: ClassVar = frozenset({"dtype", "joins_parts"})

    @property
    def message_dtype(self) -> torch.dtype:
        """The data type of the states."""
        return WIDE_DTYPES[self.defaults["dtype"]]

    def begin_step(self, group: dict[str, Any]) -> None:
        """Count a step."""
        group["num_rounds"] = group.get("num_rounds", 0) + 1

    def direction(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any], view: View, out: Tensor) -> None:
        """Write the gradient, or zeros in a step that is skipped; a stretch has no states."""
        out.copy_(view(grad))
        self.clear_if_skipped(out)

    def matrix_state(self, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
        """Return the states of a matrix before its first update."""
        (rows, columns), dtype = shape, self.message_dtype
        return {
            "exp_avg": torch.zeros(rows, columns, dtype=dtype, device=device),
            "exp_avg_sq": torch.zeros(rows, columns, dtype=dtype, device=device),
            "left": torch.zeros(rows, rows, dtype=dtype, device=device),
            "right": torch.zeros(columns, columns, dtype=dtype, device=device),
            "left_basis": torch.eye(rows, dtype=dtype, device=device),
            "right_basis": torch.eye(columns, dtype=dtype, device=device),
            "step": torch.zeros((), dtype=dtype, device=device),
        }

    def transform(self, matrices: Tensor, group: dict[str, Any], states: Sequence[dict[str, Tensor]]) -> None:
        """Update the states of matrices by their gradients, and overwrite these by the updates."""
        for matrix, state in zip(matrices, states, strict=True):
            matrix.copy_(self._update(matrix, group, state))

    def _update(self, matrix: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> Tensor:
        (beta1, beta2), is_kept = group["betas"], self.is_kept(matrix)
        kept = matrix.new_ones(()) if is_kept is None else is_kept
        for side, product in (("left", matrix @ matrix.T), ("right", matrix.T @ matrix)):
            state[side].lerp_(product, kept * (1 - group["shampoo_beta"]))
            if (group["num_rounds"] - 1) % group["refresh_every"] == 0:
                basis = state[f"{side}_basis"]
                basis.copy_(torch.where(kept == 0, basis, refreshed(state[side], basis)))
        left, right = state["left_basis"], state["right_basis"]
        state["step"].add_(kept)
        num_steps = state["step"].clamp(min=1)  # 0 if all steps so far were skipped
        state["exp_avg"].lerp_(matrix, kept * (1 - beta1))
        state["exp_avg_sq"].lerp_((left.T @ matrix @ right).square(), kept * (1 - beta2))
        first = left.T @ state["exp_avg"] @ right / (1 - beta1**num_steps)
        update = first / ((state["exp_avg_sq"] / (1 - beta2**num_steps)).sqrt() + group["eps"])
        return left @ update @ right.T * kept

    @staticmethod
    def flops(shape: tuple[int, int], group: dict[str, Any]) -> int:
        """Return a number proportional to the FLOPs of the products of a matrix and a matrix of each side."""
        rows, columns = shape
        return rows * columns * (rows + columns)


def refreshed(preconditioner: Tensor, basis: Tensor) -> Tensor:
    """Return a basis that is nearer to the eigenbasis, by a step of the power iteration."""
    shift = SHIFT * preconditioner.diagonal().mean() + torch.finfo(preconditioner.dtype).tiny
    return torch.linalg.qr(preconditioner @ basis + shift * basis).Q
