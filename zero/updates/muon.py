"""Muon: momentum whose matrices are made orthogonal by a Newton-Schulz iteration (Jordan et al., 2024).

    direction        momentum, with or without Nesterov's
    iteration        the polynomials that make it orthogonal: newton_schulz, polar_express
    iterates_on      how they are computed: from a Gram matrix for each, or from one for several (Dao AI Lab, 2026)
    normalization    none, or by the second moment of rows: NorMuon (Li et al., 2025)

The weight decay is that of `MatrixMethod`, decoupled or cautious.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from parallel.tensor.layers import is_traced
from zero.core.partition.config import DTYPES
from zero.updates.compiled import compiled_on_gpus
from zero.updates.matrix_method import WIDE_DTYPES, View
from zero.updates.matrix_optimizer import MatrixOptimizer

Coefficients = tuple[float, float, float]
IterationName = Literal["newton_schulz", "polar_express"]
IteratesOn = Literal["matrix", "gram"]
SAFETY = 1.01  # of Polar Express: rounding must not take a singular value past the range of the next polynomial
# The best polynomials of degree 5 for singular values from 1e-3 to 1, one after the other, and the limit (Amsel et al.,
# 2025, algorithm 1).
POLAR_EXPRESS: Sequence[Coefficients] = (
    *(
        (a / SAFETY, b / SAFETY**3, c / SAFETY**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        )
    ),
    (1.875, -1.25, 0.375),
)
# How much the steps that have one Gram matrix may increase a false eigenvalue of it, by `iterates_on`: to 1, if
# rounding to bf16 made it, or not at all.
MOST_GROWTH = {"gram": 256, "matrix": 0}
ROWS, ROWS_EPS = "row_mean_square", 1e-8  # of NorMuon: the name of the state, and what is added to its root
Adjustment = Literal["original", "match_rms_adamw"]
ITERATION_DTYPES = {"bf16": DTYPES["bf16"]} | WIDE_DTYPES


class Muon(MatrixOptimizer):
    """Muon for parameters that are matrices, with the arithmetic of `torch.optim.Muon`.

    The names of its settings are torch's. `lr_factor` multiplies the learning rate of matrices, `ns_eps` is torch's
    eps, and `ns_dtype` the type of the iteration, and of the messages: bf16, fp32 or fp64. `iteration`: newton_schulz
    has `ns_coefficients` in all steps, polar_express those of Polar Express, other ones in each. `iterates_on`: matrix
    makes a Gram matrix in each step, gram fewer where this takes fewer FLOPs (see `runs_of`). The default
    `adjust_lr_fn`, match_rms_adamw, gives an update the size of AdamW's, so that both can have one learning rate.
    `row_beta` is the decay of the second moment of rows, by which NorMuon divides them; None: rows stay as they are.
    `per_repetition`: each repetition of packed rows, such as a head, has matrices of its own.
    """

    own_defaults: ClassVar = {
        "momentum": 0.95,
        "nesterov": True,
        "iteration": "newton_schulz",
        "iterates_on": "matrix",
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "ns_eps": 1e-7,
        "ns_steps": 5,
        "ns_dtype": "bf16",
        "adjust_lr_fn": "match_rms_adamw",
        "row_beta": None,
        "per_repetition": False,
        "lr_factor": 1.0,
        "joins_parts": True,
    }
    own_choices: ClassVar = {
        "iteration": get_args(IterationName),
        "iterates_on": MOST_GROWTH,
        "ns_dtype": ITERATION_DTYPES,
        "adjust_lr_fn": (*get_args(Adjustment), None),
    }
    common: ClassVar = frozenset({"ns_dtype", "row_beta", "joins_parts"})

    @property
    def message_dtype(self) -> torch.dtype:
        """The data type of the iteration, to which directions would be rounded anyway."""
        return ITERATION_DTYPES[self.defaults["ns_dtype"]]

    def prepare(self, param: nn.Parameter) -> None:
        """Make the momentum of a stretch."""
        if not self.state[param]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    def direction(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any], view: View, out: Tensor) -> None:
        """Update the momentum, and write the direction that is made orthogonal."""
        buffer, skip = view(self.state[param]["momentum_buffer"]), self.skip_flag()
        weight, momentum = self.if_kept(1 - group["momentum"], grad.dtype), group["momentum"]
        write_direction_(buffer, view(grad), weight, skip, out, momentum if group["nesterov"] else None)

    def transform(self, matrices: Tensor, group: dict[str, Any], states: Sequence[dict[str, Tensor]]) -> None:
        """Make the matrices nearly orthogonal, and normalize their rows."""
        scale = self.if_kept(1 / SAFETY if group["iteration"] == "polar_express" else 1.0, matrices.dtype)
        shape = matrices.size(1), matrices.size(2)
        orthogonalize_(matrices, runs_of(polynomials(group), shape, group["iterates_on"]), group["ns_eps"], scale)
        if (beta := self.defaults["row_beta"]) is not None:  # common to all groups, as the states are
            normalize_rows_(matrices, states, self.if_kept(1 - beta, states[0][ROWS].dtype))

    def matrix_state(self, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
        """Return the second moment of the rows of a matrix, if they are normalized, before its first update."""
        if self.defaults["row_beta"] is None:
            return {}
        dtype = torch.promote_types(self.message_dtype, torch.float32)
        return {ROWS: torch.zeros(shape[0], dtype=dtype, device=device)}

    def rate(self, group: dict[str, Any], shape: tuple[int, int] | None) -> float:
        """Return the learning rate, which is adjusted to the shape of a matrix as in `torch.optim.Muon`."""
        rate = super().rate(group, shape)
        if shape is None:
            return rate
        if group["adjust_lr_fn"] == "match_rms_adamw":
            return rate * (0.2 * math.sqrt(max(shape)))
        return rate * math.sqrt(max(1, shape[0] / shape[1]))

    @staticmethod
    def flops(shape: tuple[int, int], group: dict[str, Any]) -> int:
        """Return half the FLOPs of the products of the iteration."""
        m, n = min(shape), max(shape)
        runs = runs_of(polynomials(group), shape, group["iterates_on"])
        return sum(2 * m * m * n + (4 * len(run) - 3) * m**3 for run in runs)


@compiled_on_gpus
def write_direction_(
    buffer: Tensor,
    grad: Tensor,
    weight: Tensor | float,
    skip: Tensor | None,
    out: Tensor,
    nesterov: Tensor | float | None,
) -> None:
    """Update some elements of the momentum, and write their direction to `out`; None for `nesterov` is no Nesterov.

    If the step is to be skipped, `weight` is 0, and the gradient is overwritten by zeros, but not by compiled code.
    """
    if skip is not None:
        grad = grad.masked_fill(skip, 0.0) if is_traced(grad) else grad.masked_fill_(skip, 0.0)
    buffer.lerp_(grad, weight)
    if nesterov is not None:
        torch.lerp(grad, buffer, nesterov, out=out)  # rounded to the type of `out` once
    else:
        out.copy_(buffer)


def polynomials(group: Mapping[str, Any]) -> list[Coefficients]:
    """Return the polynomial of each step of the iteration of a group."""
    given = {"newton_schulz": [group["ns_coefficients"]], "polar_express": POLAR_EXPRESS}[group["iteration"]]
    return [given[min(number, len(given) - 1)] for number in range(group["ns_steps"])]


def runs_of(steps: Sequence[Coefficients], shape: tuple[int, int], iterates_on: IteratesOn) -> list[list[Coefficients]]:
    """Divide steps into runs, for each of which the Gram matrix of a matrix of `shape` is computed once.

    gram: the next Gram matrix of a run of k steps is made of the one before. In products of m x m matrices, m being the
    smaller side and n the other one, the run takes 2 n/m + 4 k - 3, and k runs of one step k (2 n/m + 1), which is more
    if n/m is above 1.5. An eigenvalue that should be 0 grows by the square of a polynomial's slope at 0. If rounding
    has made it negative it never returns to 0, so that the growth in a run is bounded; the first one is the shortest.
    """
    most_growth = MOST_GROWTH[iterates_on] if 2 * max(shape) > 3 * min(shape) else 0
    runs: list[list[Coefficients]] = []
    growth = 1.0
    for step in reversed(steps):
        growth *= step[0] ** 2
        if not runs or growth >= most_growth:
            runs.insert(0, [])
            growth = 1.0
        runs[0].insert(0, step)
    return runs


def orthogonalize_(
    matrices: Tensor, runs: Sequence[Sequence[Coefficients]], eps: float, scale: Tensor | float = 1.0
) -> None:
    """Overwrite matrices (number, rows, columns) by ones of the same singular vectors, with singular values near 1.

    The iteration (quintic, a step for each odd polynomial of `runs`) runs in the matrices' type, from norms of `scale`.
    With runs of one step its operations are those of `torch.optim.Muon` in the same order. The result is 0 if `scale`
    is.
    """
    is_tall = matrices.size(1) > matrices.size(2)
    out = matrices.mT if is_tall else matrices
    norms = torch.linalg.vector_norm(out, dim=(1, 2), keepdim=True).clamp(min=eps)
    x = out / (norms / scale)
    for *steps, (a, b, c) in runs:
        gram, product = torch.bmm(x, x.mT), None
        for first, second, third in steps:  # their polynomials of the Gram matrix, which commute with it
            factor = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
            factor.diagonal(dim1=1, dim2=2).add_(first)
            product = factor if product is None else torch.bmm(product, factor)
            gram = torch.bmm(torch.bmm(gram, factor), factor)
        left = x if product is None else product
        left = torch.baddbmm(left, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), left, beta=a)
        x = left if product is None else torch.bmm(left, x)
    out.copy_(x)


def normalize_rows_(matrices: Tensor, states: Sequence[dict[str, Tensor]], weight: Tensor | float) -> None:
    """Divide the rows of matrices by the root of their second moment, a mean over steps with `weight` for this one.

    A matrix then gets the norm of one that is orthogonal: with match_rms_adamw, 0.2 in the mean over its elements.
    """
    norms = torch.linalg.vector_norm(matrices, dim=2, dtype=states[0][ROWS].dtype)  # (number, rows)
    means = torch.stack([state[ROWS] for state in states]).lerp_(norms.square() / matrices.size(2), weight)
    for state, mean in zip(states, means, strict=True):
        state[ROWS].copy_(mean)
    factors = 1 / (means.sqrt() + ROWS_EPS)
    of_matrices = torch.linalg.vector_norm(norms * factors, dim=1, keepdim=True).clamp(min=ROWS_EPS)
    matrices.mul_((factors * math.sqrt(min(matrices.shape[1:])) / of_matrices)[:, :, None])
