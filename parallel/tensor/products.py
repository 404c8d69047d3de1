"""The matrix products of linear layers, forward and backward, in a precision that each layer chooses."""

from collections.abc import Hashable, Sequence
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = Sequence[Tensor]


class Products(Hashable, Protocol):
    """The products of linear layers: x (tokens, in), weights (out, in), biases (out,), gradients of y (tokens, out)."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y, with a graph."""

    def outputs(self, x: Tensor, weights: Tensors, biases: Tensors) -> list[Tensor]:
        """Return y for each weight, without a graph; `biases` has as many tensors as `weights`, or none."""

    def input_gradient(self, grads: Tensors, weights: Tensors) -> Tensor:
        """Return the gradient of x: the sum over all weights."""

    def weight_gradients(self, grads: Tensors, x: Tensor) -> list[Tensor]:
        """Return the gradient of each weight."""


class OwnPrecision:
    """Products in the data type of their operands."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def outputs(self, x: Tensor, weights: Tensors, biases: Tensors) -> list[Tensor]:
        return [F.linear(x, weight, bias) for weight, bias in zip_longest(weights, biases)]

    def input_gradient(self, grads: Tensors, weights: Tensors) -> Tensor:
        total = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            torch.addmm(total, grad, weight, out=total)
        return total

    def weight_gradients(self, grads: Tensors, x: Tensor) -> list[Tensor]:
        return [grad.t() @ x for grad in grads]


OWN_PRECISION = OwnPrecision()
