"""The steps of a method for matrices put together: in one process, and by `ZeroOptimizer` over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero.optimizers.matrix_method import MatrixMethod
from zero.optimizers.matrix_updates import MatrixUpdates


class MatrixOptimizer(MatrixMethod):
    """The base class of optimizers that update whole matrices; a class derived from it writes the steps."""

    updates_class = MatrixUpdates

    @torch.no_grad()
    def update_matrix(
        self, stretches: Sequence[nn.Parameter], grads: Sequence[Tensor], group: dict[str, Any], shape: tuple[int, int]
    ) -> None:
        """Update a matrix of `shape`, given all of its stretches. May overwrite their gradients."""
        for param in stretches:
            self.prepare(param)
        matrix = stretches[0].new_empty(shape, dtype=self.message_dtype)
        parts = matrix.view(-1).split([param.numel() for param in stretches])
        for param, grad, values in zip(stretches, grads, parts, strict=True):
            self.direction(param, grad, group, Tensor.detach, values.view_as(param))
        self.transform(matrix[None], group, [self.state_of_matrix(stretches[0], shape, matrix.device)])
        for param, values in zip(stretches, parts, strict=True):
            self.add(param, values.view_as(param), group, shape)
