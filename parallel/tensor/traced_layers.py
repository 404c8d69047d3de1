"""Split layers as operations into which torch.compile does not look, with their collectives and random streams.

A compiled function calls them like any kernel, in the order and with the traffic of the layers in
`parallel/tensor/layers.py`. Collectives in a graph would bypass the axis, its log and its own reduce-scatter on gloo.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TokenDropout,
    column_gradients,
    column_product,
    row_gradients,
    row_product,
)
from parallel.tensor.token_layout import TokenLayout

_numbers = count()  # torch's registry of operations is global, and wants another name for each layout


def make_traceable(module: torch.nn.Module, tokens: TokenLayout) -> None:
    """Let torch.compile trace the split layers of a module, by operations for their layout `tokens`.

    An axis without peers needs none: nothing is sent, and all numbers are drawn from torch's own stream.
    """
    if tokens.axis.size == 1:
        return
    number = next(_numbers)
    column = _operation(f"column_linear_{number}", column_product, column_gradients, tokens, tokens.num_parts, 1)
    row = _operation(f"row_linear_{number}", row_product, row_gradients, tokens, 1, tokens.num_parts)
    dropout = _dropout(f"token_dropout_{number}", tokens) if tokens.num_parts > 1 else None
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear):
            layer.traced = column
        elif isinstance(layer, RowParallelLinear):
            layer.traced = row
        elif isinstance(layer, TokenDropout):
            layer.traced = dropout


def _operation(
    name: str,
    product: Callable[[Tensor, Tensor, Tensor, TokenLayout], Tensor],
    gradients: Callable[[Tensor, Tensor, Tensor, TokenLayout], tuple[Tensor, Tensor, Tensor]],
    tokens: TokenLayout,
    multiplied_by: int,
    divided_by: int,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Register (x, weight, bias) -> (tokens of x * multiplied_by / divided_by, out) and its gradients."""

    @torch.library.custom_op(f"zero::{name}", mutates_args=())
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return product(x, weight, bias, tokens)

    @torch.library.custom_op(f"zero::{name}_gradients", mutates_args=())
    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return gradients(grad, x, weight, tokens)

    @forward.register_fake
    def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x.new_empty(x.shape[0] * multiplied_by // divided_by, weight.shape[0])

    @backward.register_fake
    def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[:1])

    def save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    forward.register_autograd(lambda ctx, grad: backward(grad, *ctx.saved_tensors), setup_context=save)
    return forward


def _dropout(name: str, tokens: TokenLayout) -> Callable[[Tensor, float], Tensor]:
    """Register dropout of tokens whose numbers are drawn from the random stream of their layout."""

    @torch.library.custom_op(f"zero::{name}", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
    def forward(x: Tensor, probability: float) -> tuple[Tensor, Tensor]:
        with tokens.random_stream():
            return torch.native_dropout(x, probability, True)  # the same bits as F.dropout, and the mask

    @forward.register_fake
    def _(x: Tensor, probability: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)

    def save(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.scale = 1 / (1 - inputs[1])

    def backward(ctx: Any, grad: Tensor, _grad_of_mask: Tensor | None) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask * ctx.scale, None

    forward.register_autograd(backward, setup_context=save)
    return lambda x, probability: forward(x, probability)[0]
