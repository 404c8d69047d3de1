"""Split layers as operations into which torch.compile does not look, with their collectives and random streams.

A compiled function calls them like any kernel, in the order and with the traffic of the layers in
`parallel/tensor/layers.py`. Collectives in a graph would bypass the axis, its log and its own reduce-scatter on gloo.
"""

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from parallel.tensor.heads import GroupedHeads, PackedHeads
from parallel.tensor.layers import (
    ColumnLinear,
    ColumnParallelLinear,
    RowLinear,
    RowParallelLinear,
    Split,
    TokenDropout,
    column_gradients,
    column_products,
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
    column = cache(lambda products: _column_linear(f"column_linear_{next(_numbers)}", Split(tokens, products)))
    row = cache(lambda products: _row_linear(f"row_linear_{next(_numbers)}", Split(tokens, products)))
    dropout = _dropout(f"token_dropout_{next(_numbers)}", tokens) if tokens.num_parts > 1 else None
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear | PackedHeads | GroupedHeads):
            layer.traced = column(layer.products)
        elif isinstance(layer, RowParallelLinear):
            layer.traced = row(layer.products)
        elif isinstance(layer, TokenDropout):
            layer.traced = dropout


def _column_linear(name: str, split: Split) -> ColumnLinear:
    """Register (x, weights, biases) -> (tokens of x * parts, out) for each weight, and its gradients."""

    @torch.library.custom_op(f"zero::{name}", mutates_args=())
    def forward(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        return column_products(x, weights, biases, split)

    @torch.library.custom_op(f"zero::{name}_gradients", mutates_args=())
    def backward(grads: list[Tensor], x: Tensor, weights: list[Tensor], has_biases: bool) -> list[Tensor]:
        grad_x, grad_weights, grad_biases = column_gradients(grads, x, weights, split, (True, True, has_biases))
        assert grad_x is not None
        return [grad_x, *grad_weights, *grad_biases]

    @forward.register_fake
    def _(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        return [x.new_empty(x.shape[0] * split.tokens.num_parts, weight.shape[0]) for weight in weights]

    @backward.register_fake
    def _(grads: list[Tensor], x: Tensor, weights: list[Tensor], has_biases: bool) -> list[Tensor]:
        biases = [weight.new_empty(weight.shape[:1]) for weight in weights] if has_biases else []
        return [x.new_empty(x.shape), *(weight.new_empty(weight.shape) for weight in weights), *biases]

    def save(ctx: Any, inputs: tuple[Tensor, list[Tensor], list[Tensor]], output: list[Tensor]) -> None:
        x, weights, biases = inputs
        ctx.has_biases = bool(biases)
        ctx.save_for_backward(x, *weights)

    def gradients(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        x, *weights = ctx.saved_tensors
        grad_x, *of_params = backward(list(grads), x, weights, ctx.has_biases)
        return grad_x, of_params[: len(weights)], of_params[len(weights) :]

    forward.register_autograd(gradients, setup_context=save)
    return forward


def _row_linear(name: str, split: Split) -> RowLinear:
    """Register (x, weight, bias or None) -> (tokens of x / parts, out), and its gradients."""

    @torch.library.custom_op(f"zero::{name}", mutates_args=())
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return row_product(x, weight, bias, split)

    @torch.library.custom_op(f"zero::{name}_gradients", mutates_args=())
    def backward(grad: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> list[Tensor]:
        return row_gradients(grad, x, weight, split, has_bias)

    @forward.register_fake
    def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty(x.shape[0] // split.tokens.num_parts, weight.shape[0])

    @backward.register_fake
    def _(grad: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> list[Tensor]:
        bias = [weight.new_empty(weight.shape[:1])] if has_bias else []
        return [x.new_empty(x.shape), weight.new_empty(weight.shape), *bias]

    def save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        ctx.has_bias = inputs[2] is not None
        ctx.save_for_backward(*inputs[:2])

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, *of_bias = backward(grad, *ctx.saved_tensors, ctx.has_bias)
        return grad_x, grad_weight, *(of_bias or [None])

    forward.register_autograd(gradients, setup_context=save)
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
