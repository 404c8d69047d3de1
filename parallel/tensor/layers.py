"""Layers whose weights are split along the tensor axis (Megatron-LM): each rank computes its columns, rows or words.

    x -> column-parallel -> this rank's columns -> (activation, attention heads) -> row-parallel -> sum over ranks

All activations are (tokens, features). A module lists its split parameters in `split_dims`. Every other parameter is
replicated, and its gradient is bitwise the same on all ranks of the axis.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.errors import ConfigError
from parallel.mesh import Axis
from parallel.tensor.token_layout import TokenLayout

Linear = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, weight, bias) -> y


def split_dims(module: nn.Module) -> dict[str, int]:
    """Return {name: dim} of every parameter of the module that is split along the tensor axis."""
    return {
        f"{prefix}.{name}" if prefix else name: dim
        for prefix, submodule in module.named_modules()
        for name, dim in getattr(submodule, "split_dims", {}).items()
    }


def packed_rows(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return {name: numbers of rows} of every parameter of the module that holds several matrices.

    A module lists them in `packed_rows`. The rows of the parameter repeat: so many of the first matrix, so many of the
    second one, and so on, and then again of the first. Each tensor rank has whole repetitions.
    """
    return {
        f"{prefix}.{name}" if prefix else name: rows
        for prefix, submodule in module.named_modules()
        for name, rows in getattr(submodule, "packed_rows", {}).items()
    }


def part_of(size: int, axis: Axis, what: str) -> int:
    """Return the part of `size` that each rank of the axis has.

    Raises ConfigError, in which `what` is the name of `size`, if the axis does not divide it.
    """
    if size % axis.size:
        raise ConfigError(
            f"{what}={size} is not divisible by tensor_size={axis.size}; choose a tensor size that divides it"
        )
    return size // axis.size


class ColumnParallelLinear(nn.Module):
    """A linear layer, (tokens of this rank, in) -> (all tokens, out / size).

    Each rank has its rows of weight (out, in) and of bias (out,). `traced` is what torch.compile traces instead of the
    layer, if the layer sends anything.
    """

    split_dims: ClassVar = {"weight": 0, "bias": 0}
    traced: Linear | None = None

    def __init__(self, in_features: int, out_features: int, tokens: TokenLayout):
        super().__init__()
        self.tokens = tokens
        own_features = part_of(out_features, tokens.axis, "the number of output features")
        self.weight = nn.Parameter(torch.empty(own_features, in_features))
        self.bias = nn.Parameter(torch.empty(own_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.traced is not None and torch.compiler.is_compiling():
            return self.traced(x, self.weight, self.bias)
        return column_parallel_linear(x, self.weight, self.bias, self.tokens)


class RowParallelLinear(nn.Module):
    """A linear layer, (all tokens, in / size) -> (tokens of this rank, out).

    Each rank has its columns of weight (out, in) and the whole bias (out,). `traced` is as for the column-parallel one.
    """

    split_dims: ClassVar = {"weight": 1}
    traced: Linear | None = None

    def __init__(self, in_features: int, out_features: int, tokens: TokenLayout):
        super().__init__()
        self.tokens = tokens
        own_features = part_of(in_features, tokens.axis, "the number of input features")
        self.weight = nn.Parameter(torch.empty(out_features, own_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.traced is not None and torch.compiler.is_compiling():
            return self.traced(x, self.weight, self.bias)
        # The bias is added once in the sum over ranks, as part of the product: a pass of its own would take longer.
        bias = _OnFirstRank.apply(self.bias, self.tokens.axis)
        return _Reduce.apply(F.linear(x, self.weight, bias), self.tokens)


class TokenDropout(nn.Module):
    """Dropout of this rank's tokens, with equal masks on ranks that hold the same tokens.

    `traced` is what torch.compile traces instead, if the ranks draw different numbers.
    """

    traced: Callable[[Tensor, float], Tensor] | None = None

    def __init__(self, probability: float, tokens: TokenLayout):
        super().__init__()
        self.probability, self.tokens = probability, tokens

    def forward(self, x: Tensor) -> Tensor:
        probability = self.probability if self.training else 0.0
        if probability and self.traced is not None and torch.compiler.is_compiling():
            return self.traced(x, probability)
        with self.tokens.random_stream() if probability else nullcontext():
            return F.dropout(x, probability)


class VocabParallelEmbedding(nn.Module):
    """An embedding of int64 ids, (all tokens,) -> (tokens of this rank, features).

    Each rank has its rows of weight (words, features).
    """

    split_dims: ClassVar = {"weight": 0}

    def __init__(self, num_words: int, features: int, tokens: TokenLayout):
        super().__init__()
        self.tokens = tokens
        num_own_words = part_of(num_words, tokens.axis, "the padded vocabulary")
        self.first_word = tokens.axis.rank * num_own_words
        self.weight = nn.Parameter(torch.empty(num_own_words, features))

    def forward(self, ids: Tensor) -> Tensor:
        own_ids = ids - self.first_word
        is_elsewhere = (own_ids < 0) | (own_ids >= self.weight.shape[0])
        rows = F.embedding(own_ids.masked_fill(is_elsewhere, 0), self.weight)
        return _Reduce.apply(rows.masked_fill_(is_elsewhere[:, None], 0), self.tokens)


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tokens: TokenLayout) -> Tensor:
    """Apply a column-parallel linear layer, (tokens of this rank, in) -> (all tokens, out / size)."""
    return _ColumnLinear.apply(x, weight, bias, tokens)


def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, tokens: TokenLayout) -> Tensor:
    """Return the output of a column-parallel layer, without a graph."""
    whole, gathered = tokens.gather(x)
    gathered.wait()
    return F.linear(whole, weight, bias)


def column_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, tokens: TokenLayout, needed: Sequence[bool] = (True, True, True)
) -> Any:
    """Return the gradients of (x, weight, bias) of a column-parallel layer, with None for those that are not needed.

    The gather overlaps with the first product, and the reduction with the second one. All ranks launch the two
    collectives in this order.
    """
    needs_x, needs_weight, needs_bias = needed
    grad_x = grad_weight = reduced = None
    if needs_weight:
        whole, gathered = tokens.gather(x)
    if needs_x:
        grad_x, reduced = tokens.reduce(grad @ weight)
    if needs_weight:
        gathered.wait()
        grad_weight = grad.t() @ whole
    grad_bias = grad.sum(0) if needs_bias else None
    if reduced is not None:
        reduced.wait()
    return grad_x, grad_weight, grad_bias


def row_product(x: Tensor, weight: Tensor, bias: Tensor, tokens: TokenLayout) -> Tensor:
    """Return the output of a row-parallel layer, without a graph."""
    sums, reduced = tokens.reduce(F.linear(x, weight, bias if tokens.axis.rank == 0 else torch.zeros_like(bias)))
    reduced.wait()
    return sums


def row_gradients(grad: Tensor, x: Tensor, weight: Tensor, tokens: TokenLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of (x, weight, bias) of a row-parallel layer."""
    whole, gathered = tokens.gather(grad)
    gathered.wait()
    return whole @ weight, whole.t() @ x, whole.sum(0)


def gather_columns(own: Tensor, axis: Axis) -> Tensor:
    """Gather (tokens, n) from every rank into (tokens, size * n). The result's gradient must be equal on all ranks."""
    return _GatherColumns.apply(own, axis)


class _ColumnLinear(torch.autograd.Function):
    """A linear layer that gathers its input, and reduces the input's gradient while it computes the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tokens: TokenLayout) -> Tensor:
        ctx.tokens = tokens
        ctx.save_for_backward(x, weight)  # only this rank's tokens: the others are gathered again
        return column_product(x, weight, bias, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # Of a bias that is None no gradient is needed.
        return *column_gradients(grad, x, weight, ctx.tokens, ctx.needs_input_grad[:3]), None


class _Reduce(torch.autograd.Function):
    """The reduction of partial sums for all tokens to the sums for this rank's tokens.

    It saves nothing for backward, so that a recomputation can stop before it.
    """

    @staticmethod
    def forward(ctx: Any, partial_sums: Tensor, tokens: TokenLayout) -> Tensor:
        ctx.tokens = tokens
        sums, reduced = tokens.reduce(partial_sums)
        if sums is partial_sums:
            ctx.mark_dirty(partial_sums)
        reduced.wait()
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole, gathered = ctx.tokens.gather(grad)
        gathered.wait()
        return whole, None


class _OnFirstRank(torch.autograd.Function):
    """The tensor on the first rank of an axis and zeros elsewhere; every rank gets the same gradient."""

    @staticmethod
    def forward(ctx: Any, replicated: Tensor, axis: Axis) -> Tensor:
        return replicated.view_as(replicated) if axis.rank == 0 else torch.zeros_like(replicated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        parts = own.new_empty(axis.size, *own.shape)
        axis.all_gather(own.contiguous(), out=parts).wait()
        return parts.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.axis.size, dim=-1)[ctx.axis.rank], None
