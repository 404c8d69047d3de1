"""The three products of a linear layer in FP8. Each operand is quantized along the dim K that the product sums over.

    output y             x (tokens, in)          weight (out, in)                  K = in
    gradient of x        grad (tokens, out)      weight transposed (in, out)       K = out
    gradient of weight   grad transposed         x transposed (in, tokens)         K = tokens

Autograd saves x and the weight as they are, as for a product in bf16, and backward quantizes them again: so a unit's
weight is not kept in FP8 beside its full buffer, and every layout of tokens has one way. Hopper's kernels read both
operands along K, hence the contiguous transposed copies: a byte an element, freed after the product.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from parallel.tensor.products import Tensors
from zero.fp8.kernels import Device, emulated, launched, refusal
from zero.fp8.scaling import RECIPES, Recipe, RecipeName, Scaled, quantize


@dataclass(frozen=True)
class ScaledProducts:
    """Products of quantized operands: `Products` of layers in FP8.

    They are computed by kernels that add up in fp32, or in Hopper's fewer bits if `use_fast_accum`; on a CPU, or if
    they are emulated, from the values of the codes, in at least fp32. `device`: another one than that of the operands,
    which a dry run imitates.
    """

    recipe: RecipeName
    emulates: bool = False
    use_fast_accum: bool = False
    device: Device | None = None

    @property
    def _recipe(self) -> Recipe:
        return RECIPES[self.recipe]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y, with a graph. Raises ValueError if x is in fp16."""
        if x.dtype is torch.float16:
            raise ValueError("a product in FP8 has an input in fp16, whose range is smaller; use bf16")
        if not x.numel():
            return F.linear(x, weight, bias)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self.linear(x.to(torch.get_autocast_dtype(x.device.type)), weight, bias)
        y = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, self)
        return y.view(*x.shape[:-1], -1)

    def outputs(self, x: Tensor, weights: Tensors, biases: Tensors) -> list[Tensor]:
        """Return y for each weight, without a graph."""
        scaled = quantize(x, self._recipe)
        ys = [self._product(scaled, quantize(weight, self._recipe, is_weight=True), x.dtype) for weight in weights]
        return [y.add_(bias) for y, bias in zip(ys, biases, strict=True)] if biases else ys

    def input_gradient(self, grads: Tensors, weights: Tensors) -> Tensor:
        """Return the gradient of x."""
        total = self._input_gradient(grads[0], weights[0])
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            total += self._input_gradient(grad, weight)
        return total

    def weight_gradients(self, grads: Tensors, x: Tensor) -> list[Tensor]:
        """Return the gradient of each weight."""
        scaled = quantize(x.t(), self._recipe)
        return [self._product(quantize(grad.t(), self._recipe), scaled, x.dtype) for grad in grads]

    def _input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._product(
            quantize(grad, self._recipe), quantize(weight.t(), self._recipe, is_weight=True), grad.dtype
        )

    def _product(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
        kind = self.device.kind if self.device is not None else a.codes.device.type
        if self.emulates or kind == "cpu":
            return emulated(a, b, dtype)
        if not torch.compiler.is_compiling():  # the compiler cannot trace the query of a device
            device, shape = self.device or Device.of(a.codes.device), (a.codes.shape[0], *b.codes.shape)
            if (reason := refusal(self.recipe, device, dtype, shape)) is not None:
                raise ValueError(f"a product in FP8 cannot be computed: {reason}; emulate it, or pad the layer")
        return launched(a, b, dtype, use_fast_accum=self.use_fast_accum)


class _Linear(torch.autograd.Function):
    """A linear layer of x (tokens, in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: ScaledProducts) -> Tensor:
        ctx.products = products
        ctx.save_for_backward(x, weight)
        (y,) = products.outputs(x, [weight], [] if bias is None else [bias])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = ctx.products.input_gradient([grad], [weight]) if needs_x else None
        grad_weight = ctx.products.weight_gradients([grad], x)[0] if needs_weight else None
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None, None
