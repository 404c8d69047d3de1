"""Split layers as operations into which torch does not look when it traces, with their collectives and random streams.

A graph calls them like any kernel, in the order and with the traffic of the layers in `parallel/tensor/layers.py`.
Collectives in a graph would bypass the axis, its log and its own reduce-scatter on gloo.
"""

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from parallel.tensor.layers import (
    Linears,
    RowParallelLinear,
    Split,
    SplitLinear,
    TokenDropout,
    column_gradients,
    column_products,
    row_gradients,
    row_products,
)
from parallel.tensor.token_layout import TokenLayout

_numbers = count()  # torch's registry of operations is global, and wants another name for each layout


def make_traceable(module: torch.nn.Module) -> None:
    """Let torch trace the split layers of a module, by operations for the layout of their tokens.

    An axis without peers needs none: nothing is sent, and all numbers are drawn from torch's own stream.
    """
    for layer in module.modules():
        if isinstance(layer, SplitLinear) and layer.tokens.axis.size > 1:
            layer.traced = _linears(Split(layer.tokens, layer.products), isinstance(layer, RowParallelLinear))
        elif isinstance(layer, TokenDropout) and layer.tokens.num_parts > 1:
            layer.traced = _dropout(layer.tokens)


@cache
def _linears(split: Split, is_row: bool) -> Linears:
    """Register (x, weights, biases) -> y for each weight, and its gradients; a row-parallel layer has one weight."""
    name = f"{'row' if is_row else 'column'}_linear_{next(_numbers)}"
    compute, compute_gradients = (row_products, row_gradients) if is_row else (column_products, column_gradients)
    parts = split.tokens.num_parts

    def products(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        return compute(x, weights, biases, split)

    def product_gradients(grads: list[Tensor], x: Tensor, weights: list[Tensor], has_biases: bool) -> list[Tensor]:
        grad_x, grad_weights, grad_biases = compute_gradients(grads, x, weights, split, (True, True, has_biases))
        assert grad_x is not None
        return [grad_x, *grad_weights, *grad_biases]

    forward = torch.library.custom_op(f"zero::{name}", products, mutates_args=())
    backward = torch.library.custom_op(f"zero::{name}_gradients", product_gradients, mutates_args=())

    @forward.register_fake
    def _(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        num_tokens = x.shape[0] // parts if is_row else x.shape[0] * parts
        return [x.new_empty(num_tokens, weight.shape[0]) for weight in weights]

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

    @register_flop_formula(getattr(torch.ops.zero, name))
    def _(x: torch.Size, weights: list[torch.Size], *_others: Any, out_shape: list[torch.Size], **_options: Any) -> int:
        num_tokens = max(x[0], out_shape[0][0])
        return sum(2 * num_tokens * weight.numel() for weight in weights)

    forward.register_autograd(gradients, setup_context=save)
    return forward


@cache
def _dropout(tokens: TokenLayout) -> Callable[[Tensor, float], Tensor]:
    """Register dropout of tokens whose numbers are drawn from the random stream of their layout."""

    @torch.library.custom_op(
        f"zero::token_dropout_{next(_numbers)}", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
    )
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
