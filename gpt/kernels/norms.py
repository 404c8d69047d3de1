"""The norms of a GPT, among them an RMSNorm that keeps its input and one number a token for backward on every device.

On a GPU that is torch's own kernel. On a CPU torch computes it operation by operation, and keeps their results: there,
and in a dry run, which counts the kernels and bytes of a GPU on tensors of a CPU, it is one operation too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dim, computed in fp32 or wider."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or torch.compiler.is_compiling():
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _rms_norm(x, self.weight, self.eps)[0]


NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.library.custom_op("zero::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized tensor, and the factors (..., 1) by which its elements were multiplied."""
    wide = _wide(x)
    factors = (wide.square().mean(-1, keepdim=True) + eps).rsqrt_()
    return (wide * factors * weight).to(x.dtype), factors


@torch.library.custom_op("zero::rms_norm_gradients", mutates_args=())
def _gradients(grad: Tensor, x: Tensor, weight: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    normalized, wide_grad = _wide(x) * factors, _wide(grad)
    grad_weight = (wide_grad * normalized).flatten(0, -2).sum(0).to(weight.dtype)
    wide_grad = wide_grad * weight
    grad_x = (wide_grad - normalized * (wide_grad * normalized).mean(-1, keepdim=True)) * factors
    return grad_x.to(x.dtype), grad_weight


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _wide(x.new_empty(0)).new_empty(*x.shape[:-1], 1)


@_gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _backward(ctx: Any, grad: Tensor, _grad_of_factors: Tensor | None) -> tuple[Tensor, Tensor, None]:
    return *_gradients(grad, *ctx.saved_tensors), None


_rms_norm.register_autograd(_backward, setup_context=_save)
