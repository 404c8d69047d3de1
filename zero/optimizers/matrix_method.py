"""AdamW whose groups of matrices are updated by another method. Only one of its steps needs whole matrices.

    direction     the values of an owned stretch that are sent, after an update of its states   element by element
    transform     the update of a matrix, from the directions of all of its elements          whole matrices
    decay, add    the update of an owned stretch                                              element by element

zero/optimizers/matrix_optimizer.py puts these steps together, in one process and over ranks.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from zero.optimizers.grouped_adamw import GroupedAdamW
from zero.step.atoms import MATRIX


class MatrixMethod(GroupedAdamW):
    """A method for groups of matrices, and AdamW for the others.

    If the model is split along a tensor axis, the parts of a matrix are put together along it too; with the setting
    `joins_parts=False` each rank's part is a matrix of its own, which sends nothing along this axis and gives other
    updates.
    """

    own_atom = MATRIX

    def __init__(self, params: Any, **settings: Any):
        super().__init__(params, **settings)
        self.matrix_states: dict[Any, dict[str, Tensor]] = {}

    @property
    @abstractmethod
    def message_dtype(self) -> torch.dtype:
        """The data type in which directions and updates are sent."""

    def prepare(self, param: nn.Parameter) -> None:
        """Make the states of a stretch, before its first update."""

    @abstractmethod
    def direction(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the states of a stretch, and return the values to send. May overwrite `grad`."""

    def matrix_state(self, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
        """Return the states of a whole matrix, before its first update; they are on the rank that computes it."""
        return {}

    def state_of_matrix(self, key: Any, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
        """Return the present states of a whole matrix, which are made if there are none for this key."""
        if key not in self.matrix_states:
            self.matrix_states[key] = self.matrix_state(shape, device)
        return self.matrix_states[key]

    @staticmethod
    def matrix_state_numel(shape: tuple[int, int]) -> int:
        """Return the number of elements of these states."""
        return 0

    @abstractmethod
    def transform(self, matrix: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> Tensor:
        """Return the update of a whole matrix, given the directions in `message_dtype`, and change its states."""

    def decay(self, param: Tensor, group: dict[str, Any]) -> None:
        """Apply the decoupled weight decay to a stretch."""
        decay, is_kept = self.rate(group, None) * group["weight_decay"], self.is_kept(param)
        if decay:
            param.mul_(1 - decay if is_kept is None else 1 - is_kept * decay)

    def add(self, param: Tensor, update: Tensor, group: dict[str, Any], shape: tuple[int, int]) -> None:
        """Apply its part of the update to a stretch of a matrix of `shape`."""
        param.add_(update, alpha=-self.rate(group, shape))

    def rate(self, group: dict[str, Any], shape: tuple[int, int] | None) -> float:
        """Return the learning rate of a matrix of `shape`, or for None of the weight decay."""
        return group["lr"] * group["lr_factor"]

    @staticmethod
    @abstractmethod
    def flops(shape: tuple[int, int]) -> int:
        """Return a number proportional to the FLOPs of `transform`, by which matrices are divided over ranks."""
