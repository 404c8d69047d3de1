"""AdamW whose groups of matrices are updated by another method, in steps of which one only needs whole matrices.

    direction     what is sent of an owned stretch, after its own states have been updated    element by element
    transform     the update of a matrix, from the directions of all of its elements          whole matrices
    decay, add    the update of an owned stretch                                              element by element

`ZeroOptimizer` runs the middle step on the rank that the matrix is assigned to. `step` runs all of them for parameters
that are whole.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from zero.optimizers.atoms import Atom

ADAM_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
COMMON_DEFAULTS = {"joins_parts": True}


class MatrixOptimizer(AdamW):
    """AdamW for groups with update="adamw", and a method for matrices for those with update=`method`.

    The settings are those of torch's AdamW, and those of the method. The fused AdamW, which is the default, lets a step
    be skipped without a wait: see `ZeroOptimizer`. If the model is split along a tensor axis, the parts of a matrix are
    put together along it too; with `joins_parts=False` each rank's part is a matrix of its own, which sends nothing
    along this axis and gives other updates.
    """

    method: ClassVar[str]
    own_defaults: ClassVar[dict[str, Any]]
    """The settings of the method, with their defaults."""

    def __init__(self, params: Any, **settings: Any):
        own = {name: settings.pop(name, value) for name, value in (COMMON_DEFAULTS | self.own_defaults).items()}
        super().__init__(params, **ADAM_DEFAULTS | settings)
        self.defaults |= {"update": self.method, **own}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            if group["update"] not in (self.method, "adamw"):
                raise ValueError(f"update={group['update']!r} of a group; choose {self.method!r} or 'adamw'")

    def atom(self, group: dict[str, Any]) -> Atom:
        """Return the atom of a group."""
        return Atom.MATRIX if group["update"] == self.method else Atom.ELEMENT

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

    def is_kept(self, like: Tensor) -> Tensor | None:
        """Return 0 if the step is to be skipped, else 1, in the type of `like`; None if no flag has been set."""
        found_inf = getattr(self, "found_inf", None)
        return None if found_inf is None else (1.0 - found_inf).to(like.dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update whole parameters; those that are matrices as one matrix each."""
        groups = self.param_groups
        for group in groups:
            if self.atom(group) is Atom.MATRIX:
                for param in group["params"]:
                    if param.grad is not None:
                        self._step_whole(param, param.grad, group)
        self.param_groups = [group for group in groups if self.atom(group) is Atom.ELEMENT]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_whole(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        if param.dim() != 2:
            raise ValueError(f"update={self.method!r} is for matrices, not for shape {tuple(param.shape)}")
        self.prepare(param)
        update = self.transform(self.direction(param, grad, group).to(self.message_dtype), group)
        if (is_kept := self.is_kept(update)) is not None:
            update = update * is_kept
        self.decay(param, group)
        self.add(param, update, group, (param.shape[0], param.shape[1]))
