"""Split layers as operations into which torch does not look when it traces, with their collectives and random streams.

A graph calls them like any kernel, in the order and with the traffic of the layers in `parallel/tensor/layers.py`.
Collectives in a graph would bypass the axis, its log and its own reduce-scatter on gloo.
"""

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel.mesh import Axis
from parallel.tensor.context import exchange, exchange_operation
from parallel.tensor.heads import GroupedHeads, PackedHeads
from parallel.tensor.layers import (
    ColumnParallelLinear,
    Linears,
    RowParallelLinear,
    Split,
    TokenDropout,
    column_gradients,
    column_products,
    row_gradients,
    row_products,
)
from parallel.tensor.products import Tensors
from parallel.tensor.token_layout import TokenLayout
from parallel.torch_internals import OpOverload

_numbers = count()  # torch's registry of operations is global, and wants another name for each layout


class AxisOperation(NamedTuple):
    """An operation with collectives: what it runs, and what it allocates and sends beside its arguments and results."""

    run: Callable[..., Any]
    workspace_bytes: Callable[[Tensors, Tensors], int]  # of its arguments and its results
    sent_bytes: Callable[[Tensors, Tensors], float]  # by a rank, in forward
    flops: Callable[[Tensors, Tensors], float]
    is_reduced: bool = False  # a sum over the tensor axis, and so equal on all ranks that hold the same tokens


def _of_layer(run: Callable[..., Any], tokens: TokenLayout, is_row: bool, is_backward: bool) -> AxisOperation:
    """Return the operation of a split layer.

    A row-parallel one sends its results in forward, and a column-parallel one its input. Each gathers what it reads of
    the other tokens; the gradients of columns need the input and the gradient of it for all tokens.
    """
    parts, size = tokens.num_parts, tokens.axis.size
    is_reduced, num_whole = is_row and not is_backward, 2 if is_backward and not is_row else 1
    num_sent = parts - 1 if parts > 1 else 2 * (size - 1) / size * is_reduced

    def bytes_of_own_tokens(arguments: Tensors, results: Tensors) -> int:
        return (arguments if is_row == is_backward else results)[0].nbytes

    return AxisOperation(
        run,
        lambda *tensors: num_whole * parts * bytes_of_own_tokens(*tensors) if parts > 1 else 0,
        lambda *tensors: num_sent * bytes_of_own_tokens(*tensors),
        _backward_flops if is_backward else _forward_flops,
        is_reduced,
    )


def _forward_flops(arguments: Tensors, results: Tensors) -> float:
    """Return the operations of a product with each weight, of arguments (x, weights and biases)."""
    num_tokens = max(arguments[0].shape[0], results[0].shape[0])
    return 2.0 * num_tokens * sum(param.numel() for param in arguments[1:] if param.dim() == 2)


def _backward_flops(arguments: Tensors, results: Tensors) -> float:
    """Return the operations of two products for each weight, of results (gradients of x, of weights and biases)."""
    num_tokens = max(tensor.shape[0] for tensor in arguments[:2])  # of a gradient, and of another one or x
    return 4.0 * num_tokens * sum(grad.numel() for grad in results[1:] if grad.dim() == 2)


Operations = dict[OpOverload, AxisOperation]


def make_traceable(module: torch.nn.Module) -> Operations:
    """Let torch trace the split layers of a module, by operations for the layout of their tokens; return these.

    An axis without peers needs none: nothing is sent, and all numbers are drawn from torch's own stream.
    """
    found: Operations = {}
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear | PackedHeads | GroupedHeads | RowParallelLinear):
            if layer.tokens.axis.size > 1:
                split = Split(layer.tokens, layer.products)
                layer.traced, operations = _linears(split, isinstance(layer, RowParallelLinear))
                found |= operations
            if layer.tokens.context.size > 1:
                found |= _exchange(layer.tokens.context)
        elif isinstance(layer, TokenDropout) and layer.tokens.num_parts > 1:
            layer.traced = _dropout(layer.tokens)
    return found


def _kernel(name: str) -> OpOverload:
    return getattr(torch.ops.zero, name).default


@cache
def _exchange(context: Axis) -> Operations:
    """Return the exchange of heads and tokens, which sends and receives one message."""

    def run(parts: list[Tensor], divided: int, joined: int) -> list[Tensor]:
        return exchange(context, divided, joined, parts)

    def message_bytes(parts: Tensors, _results: Tensors) -> int:
        return sum(part.nbytes for part in parts)

    name, _ = exchange_operation(context)
    size = context.size
    return {
        _kernel(name): AxisOperation(
            run,
            lambda *tensors: 2 * message_bytes(*tensors),
            lambda *tensors: (size - 1) / size * message_bytes(*tensors),
            lambda *_: 0.0,
        )
    }


@cache
def _linears(split: Split, is_row: bool) -> tuple[Linears, Operations]:
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

    forward.register_autograd(gradients, setup_context=save)
    return forward, {
        _kernel(name): _of_layer(products, split.tokens, is_row, is_backward=False),
        _kernel(f"{name}_gradients"): _of_layer(product_gradients, split.tokens, is_row, is_backward=True),
    }


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
