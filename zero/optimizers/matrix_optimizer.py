"""AdamW whose groups of matrices are updated by another method, in steps of which one only needs whole matrices.

    direction     what is sent of an owned stretch, after its own states have been updated    element by element
    transform     the update of a matrix, from the directions of all of its elements          whole matrices
    decay, add    the update of an owned stretch                                              element by element

`ZeroOptimizer` runs the middle step on the rank that the matrix is assigned to. `step` runs all of them for parameters
that are whole.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from zero.optimizers.atoms import MATRIX
from zero.optimizers.grouped_adamw import GroupedAdamW


class MatrixOptimizer(GroupedAdamW):
    """A method for groups of matrices, and AdamW for the others.

    If the model is split along a tensor axis, the parts of a matrix are put together along it too; with the setting
    `joins_parts=False` each rank's part is a matrix of its own, which sends nothing along this axis and gives other
    updates.
    """

    own_atom = MATRIX

    @property
    @abstractmethod
    def message_dtype(self) -> torch.dtype:
        """The data type in which directions and updates are sent."""

    @abstractmethod
    def prepare(self, param: nn.Parameter) -> None:
        """Make the states of a stretch, before its first update."""

    @abstractmethod
    def direction(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the states of a stretch, and return what is sent of it. May overwrite `grad`."""

    @abstractmethod
    def transform(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the update of a whole matrix, given the directions in `message_dtype`."""

    @abstractmethod
    def decay(self, param: Tensor, group: dict[str, Any]) -> None:
        """Apply the weight decay to a stretch."""

    @abstractmethod
    def add(self, param: Tensor, update: Tensor, group: dict[str, Any], shape: tuple[int, int]) -> None:
        """Apply its part of the update to a stretch of a matrix of `shape`."""

    @staticmethod
    @abstractmethod
    def flops(shape: tuple[int, int]) -> int:
        """Return a number proportional to the FLOPs of `transform`, by which matrices are divided over ranks."""

    def update_param(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a whole parameter, which is one matrix."""
        if param.dim() != 2:
            raise ValueError(f"update={self.method!r} is for matrices, not for shape {tuple(param.shape)}")
        self.prepare(param)
        update = self.transform(self.direction(param, grad, group).to(self.message_dtype), group)
        if (is_kept := self.is_kept(update)) is not None:
            update = update * is_kept
        self.decay(param, group)
        self.add(param, update, group, (param.shape[0], param.shape[1]))
