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


def _of_layer(
    run: Callable[..., Any],
    tokens: TokenLayout,
    stream: Callable[[Tensors, Tensors], Tensor],
    num_whole: int = 1,
    is_reduced: bool = False,
    is_backward: bool = False,
) -> AxisOperation:
    """Return the operation of a split layer.

    `stream` returns, of its arguments and its results, the tensor with a row for each token of this rank. If each rank
    has its own tokens, `num_whole` tensors like it hold those of all.
    """
    parts, size = tokens.num_parts, tokens.axis.size
    num_sent = parts - 1 if parts > 1 else 2 * (size - 1) / size * is_reduced
    return AxisOperation(
        run,
        lambda *tensors: num_whole * parts * stream(*tensors).nbytes if parts > 1 else 0,
        lambda *tensors: num_sent * stream(*tensors).nbytes,
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


def _first_argument(arguments: Tensors, _results: Tensors) -> Tensor:
    return arguments[0]


def _first_result(_arguments: Tensors, results: Tensors) -> Tensor:
    return results[0]


Operations = dict[OpOverload, AxisOperation]


def make_traceable(module: torch.nn.Module) -> Operations:
    """Let torch trace the split layers of a module, by operations for the layout of their tokens; return these.

    An axis without peers needs none: nothing is sent, and all numbers are drawn from torch's own stream.
    """
    found: Operations = {}
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear | PackedHeads | GroupedHeads | RowParallelLinear):
            if layer.tokens.axis.size > 1:
                register = _row_linear if isinstance(layer, RowParallelLinear) else _column_linear
                layer.traced, operations = register(Split(layer.tokens, layer.products))
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
def _column_linear(split: Split) -> tuple[ColumnLinear, Operations]:
    """Register (x, weights, biases) -> (tokens of x * parts, out) for each weight, and its gradients."""
    name = f"column_linear_{next(_numbers)}"

    def products(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        return column_products(x, weights, biases, split)

    def product_gradients(grads: list[Tensor], x: Tensor, weights: list[Tensor], has_biases: bool) -> list[Tensor]:
        grad_x, grad_weights, grad_biases = column_gradients(grads, x, weights, split, (True, True, has_biases))
        assert grad_x is not None
        return [grad_x, *grad_weights, *grad_biases]

    forward = torch.library.custom_op(f"zero::{name}", products, mutates_args=())
    backward = torch.library.custom_op(f"zero::{name}_gradients", product_gradients, mutates_args=())

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
    return forward, {
        _kernel(name): _of_layer(products, split.tokens, _first_argument),
        _kernel(f"{name}_gradients"): _of_layer(
            product_gradients, split.tokens, _first_result, num_whole=2, is_backward=True
        ),
    }


@cache
def _row_linear(split: Split) -> tuple[RowLinear, Operations]:
    """Register (x, weight, bias or None) -> (tokens of x / parts, out), and its gradients."""
    name = f"row_linear_{next(_numbers)}"

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return row_product(x, weight, bias, split)

    def product_gradients(grad: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> list[Tensor]:
        return row_gradients(grad, x, weight, split, has_bias)

    forward = torch.library.custom_op(f"zero::{name}", product, mutates_args=())
    backward = torch.library.custom_op(f"zero::{name}_gradients", product_gradients, mutates_args=())

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
    return forward, {
        _kernel(name): _of_layer(product, split.tokens, _first_result, is_reduced=True),
        _kernel(f"{name}_gradients"): _of_layer(product_gradients, split.tokens, _first_argument, is_backward=True),
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
