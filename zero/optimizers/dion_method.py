"""Dion: momentum whose updates are orthonormal factors of low rank (Ahn et al., 2025, algorithm 1).

    B = M + G                         the gradient added to the momentum, of m x n
    P = orthonormal(B Q)              of m x r: a step of the power iteration, from the Q of the step before
    R = B^T P                         of n x r
    M = B - (1 - momentum) P R^T      what P R^T does not have of B stays for later steps: error feedback
    Q = R, its columns divided by their lengths;    the update is P Q^T, times sqrt(m / n)

A row of B Q is a product of that row of B, and R a sum over all rows: B may stay where it is (zero/optimizers/dion.py).
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zero.optimizers.matrix_method import WIDE_DTYPES, MatrixMethod

NUM_PASSES = 3
MOMENTUM, RIGHT = "momentum_buffer", "right_factor"  # names of states
ROUNDINGS = 32  # a column that is shorter than so many roundings of the longest one is what rounding has left of zero


class DionMethod(MatrixMethod):
    """Dion for groups of matrices, and AdamW for groups with update="adamw".

    `rank_fraction` times the smaller side of a matrix, rounded up, is the number of columns of its factors, which are
    computed and sent in `dtype`, fp32 or fp64. `momentum` is the part of P R^T that stays in the momentum. The rate
    of a matrix is `lr_factor` sqrt(rows / columns) times the learning rate. Raises ValueError if one is out of range.

    bf16 would not do: of a B that lacks a direction, rounding leaves parts of others in it, of which a length of 1 is
    made.
    """

    method = "dion"
    own_defaults: ClassVar = {"momentum": 0.95, "rank_fraction": 0.25, "dtype": "fp32", "lr_factor": 1.0}
    own_choices: ClassVar = {"dtype": WIDE_DTYPES}
    common: ClassVar = frozenset({"rank_fraction", "dtype"})

    def __init__(self, params: Any, **settings: Any):
        super().__init__(params, **settings)
        if not 0 < (fraction := self.defaults["rank_fraction"]) <= 1:
            raise ValueError(f"rank_fraction={fraction} of Dion is not above 0 and at most 1; choose 0.25, for example")

    @property
    def factor_dtype(self) -> torch.dtype:
        """The data type of factors."""
        return WIDE_DTYPES[self.defaults["dtype"]]

    def prepare(self, param: nn.Parameter) -> None:
        """Make the momentum of a stretch."""
        if not self.state[param]:
            self.state[param][MOMENTUM] = torch.zeros_like(param)

    def accumulate(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Add the gradient to the momentum."""
        self.clear_if_skipped(grad)
        self.state[param][MOMENTUM].add_(grad)

    def factor_columns(self, shape: tuple[int, int]) -> int:
        """Return the number of columns of the factors of a matrix."""
        return math.ceil(self.defaults["rank_fraction"] * min(shape))

    def matrix_state(self, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
        """Return the right factor of a matrix before its first update: random, and the same in every run."""
        size, generator = (shape[1], self.factor_columns(shape)), torch.Generator().manual_seed(0)
        return {RIGHT: torch.randn(size, generator=generator, dtype=self.factor_dtype).to(device)}

    def matrix_state_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of the right factor."""
        return shape[1] * self.factor_columns(shape) * self.factor_dtype.itemsize

    @torch.no_grad()
    def update_matrix(
        self, stretches: Sequence[nn.Parameter], grads: Sequence[Tensor], group: dict[str, Any], shape: tuple[int, int]
    ) -> None:
        """Update a matrix of `shape`, given all of its stretches. May overwrite their gradients."""
        for param, grad in zip(stretches, grads, strict=True):
            self.prepare(param)
            self.accumulate(param, grad, group)
        momentum = [self.state[param][MOMENTUM] for param in stretches]
        whole = torch.cat([part.flatten() for part in momentum]).view(shape).to(self.factor_dtype)
        right = self.state_of_matrix(stretches[0], shape, whole.device)[RIGHT]
        left = orthonormal(whole @ right)
        product = whole.T @ left
        scales = column_scales(product, self.if_kept(1.0, product.dtype))
        right.copy_(normalized(product, scales, right))
        numels = [param.numel() for param in stretches]
        fed_back = (left @ (product * (scales != 0)).T).flatten().split(numels)
        updates = (left @ (product * scales).T).flatten().split(numels)
        for param, part, fed, update in zip(stretches, momentum, fed_back, updates, strict=True):
            self.feed_back(part, fed.view_as(part), group)
            self.add(param, update.view_as(param), group, shape)

    def feed_back(self, momentum: Tensor, product: Tensor, group: dict[str, Any]) -> None:
        """Take what the factors have of the momentum out of it, but for the part `momentum`."""
        momentum.sub_(product, alpha=1 - group["momentum"])

    def rate(self, group: dict[str, Any], shape: tuple[int, int] | None) -> float:
        """Return the learning rate, which is adjusted to the shape of a matrix."""
        return super().rate(group, shape) * (1.0 if shape is None else math.sqrt(shape[0] / shape[1]))

    @staticmethod
    def flops(shape: tuple[int, int], group: dict[str, Any]) -> int:
        """Return a number proportional to the FLOPs of the decomposition of B Q."""
        return shape[0] * min(shape) ** 2


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis (..., rows, columns) of columns, each from those before it: the Q of a QR.

    A Cholesky decomposition of the Gram matrix gives it by products, which GPUs compute much faster than a QR. It loses
    the square of the condition number, which a second and a third one restore, and is shifted, so that it exists for
    columns that depend on others: these become shorter than 1.
    """
    # TF32 would leave three digits of a Gram matrix.
    x = columns if torch.get_float32_matmul_precision() == "highest" else columns.double()
    x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    for _ in range(NUM_PASSES):
        gram = x.mT @ x + len(unit) * torch.finfo(x.dtype).eps * unit
        lower, info = torch.linalg.cholesky_ex(gram)
        found = x @ torch.linalg.solve_triangular(lower, unit.expand_as(lower), upper=False).mT
        x = torch.where((info == 0)[..., None, None], found, x)  # a pass that fails changes nothing
    return x.to(columns)


def column_scales(products: Tensor, kept: Tensor | float) -> Tensor:
    """Return the inverse lengths of the columns of R (..., rows, columns); 0 for one of zeros, and if `kept` is 0."""
    lengths = torch.linalg.vector_norm(products, dim=-2)
    least = ROUNDINGS * torch.finfo(lengths.dtype).eps * lengths.amax(-1, keepdim=True)
    return torch.where(lengths > least, lengths.reciprocal(), 0.0) * kept


def normalized(products: Tensor, scales: Tensor, before: Tensor) -> Tensor:
    """Return R with columns of length 1: the next Q. A column whose scale is 0 stays as it was `before`."""
    return torch.where(scales != 0, products * scales, before)
