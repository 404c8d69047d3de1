"""The base of optimizers of matrices: what is computed of stretches, and of whole matrices.

    direction     the states of owned elements, and their values that are sent                element by element
    transform     the updates of equal matrices, from the directions of all of their elements  whole matrices
    add           the weight decay and the update of owned elements                           element by element

`update_matrix` puts these steps together in one process, and zero/updates/matrix_update.py over ranks.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero.core.partition.config import DTYPES
from zero.updates.cautious_adamw import decay_cautiously
from zero.updates.compiled import compiled_on_gpus
from zero.updates.skippable import SkippableOptimizer

View = Callable[[Tensor], Tensor]
WIDE_DTYPES = {"fp32": DTYPES["fp32"], "fp64": torch.float64}


class MatrixMethod(SkippableOptimizer):
    """A method of updating matrices, each of which one rank computes.

    A class for an optimizer, such as `Soap`, derives from `MatrixOptimizer` and defines `own_defaults` with
    "lr_factor", `message_dtype`, `direction`, `transform` and `flops`; `prepare` if owned elements have states, and
    `matrix_state` if whole matrices have some. In a step that is skipped no state changes, and updates are zeros.

    If the model is split along a tensor axis, the parts of a matrix are put together along it too. Methods with the
    setting `joins_parts` may be given False: each rank's part then is a matrix of its own, which sends nothing along
    this axis and gives other updates.
    """

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
    def direction(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any], view: View, out: Tensor) -> None:
        """Update the states of some elements, and write the values to send to `out`.

        `view` selects the elements, of the gradient and of a state of the parameter. May overwrite the gradient. The
        values are finite, also in a step that is skipped.
        """

    @abstractmethod
    def transform(self, matrices: Tensor, group: dict[str, Any], states: Sequence[dict[str, Tensor]]) -> None:
        """Overwrite directions by updates, of matrices (number, rows, columns) in `message_dtype`; change their states.

        In a step that is skipped the updates are zeros.
        """

    def matrix_state(self, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
        """Return the states of a whole matrix, before its first update; they are on the rank that computes it."""
        return {}

    def state_of_matrix(self, key: Any, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
        """Return the present states of a whole matrix, which are made if there are none for this key."""
        if key not in self.matrix_states:
            self.matrix_states[key] = self.matrix_state(shape, device)
        return self.matrix_states[key]

    def matrix_state_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of these states."""
        return sum(value.nbytes for value in self.matrix_state(shape, torch.device("meta")).values())

    def add(self, param: Tensor, update: Tensor, group: dict[str, Any], shape: tuple[int, int]) -> None:
        """Apply the weight decay and its part of the update to a stretch of a matrix of `shape`."""
        decayed = 1 - self.rate(group, None) * group["weight_decay"]
        factor = self.if_kept(decayed, param.dtype, otherwise=1.0) if group["weight_decay"] else None
        add_(param.detach(), update, -self.rate(group, shape), factor, is_cautious=group["cautious_decay"])

    def rate(self, group: dict[str, Any], shape: tuple[int, int] | None) -> float:
        """Return the learning rate of a matrix of `shape`, or for None of the weight decay."""
        return group["lr"] * group["lr_factor"]

    @staticmethod
    @abstractmethod
    def flops(shape: tuple[int, int], group: dict[str, Any]) -> int:
        """Return a number proportional to the FLOPs of a whole matrix, by which matrices are divided over ranks."""

    def update_param(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a whole parameter, which is one matrix."""
        if param.dim() != 2:
            raise ValueError(f"{type(self).__name__} is for matrices, not for shape {tuple(param.shape)}")
        self.update_matrix([param], [grad], group, (param.shape[0], param.shape[1]))

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


@compiled_on_gpus
def add_(
    param: Tensor, update: Tensor, rate: Tensor | float, factor: Tensor | float | None, *, is_cautious: bool
) -> None:
    """Multiply some elements by `factor`, all or those that the update brings nearer to zero; add rate * update."""
    if factor is not None and is_cautious:
        decay_cautiously(param, update, factor)
    elif factor is not None:
        param.mul_(factor)
    if isinstance(rate, Tensor):
        param.add_(update.to(param.dtype) * rate)
    else:
        param.add_(update, alpha=rate)
