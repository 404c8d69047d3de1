"""Layers whose weights are split along the tensor axis (Megatron-LM): each rank computes its columns, rows or words.

    x -> column-parallel -> this rank's columns -> (activation, attention heads) -> row-parallel -> sum over ranks

All activations are (tokens, features). A module lists its split parameters in `split_dims`; see
parallel/tensor/split_parameters.py.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.mesh import Axis
from parallel.tensor.products import OWN_PRECISION, Products, Tensors
from parallel.tensor.token_layout import TokenLayout
from parallel.torch_internals import FunctionalTensor
from parallel.validation.errors import ConfigError

Linears = Callable[[Tensor, Tensors, Tensors], list[Tensor]]  # (x, weights, biases) -> one y a weight
Gradients = tuple[Tensor | None, list[Tensor], list[Tensor]]  # of x, weights and biases


def is_traced(x: Tensor) -> bool:
    """Return whether torch.compile or AOTAutograd traces a function of `x`, instead of running it."""
    return torch.compiler.is_compiling() or isinstance(x, FunctionalTensor)


def part_of(size: int, axis: Axis, what: str) -> int:
    """Return the part of `size` that each rank of the axis has.

    Raises ConfigError, in which `what` is the name of `size`, if the axis does not divide it.
    """
    if size % axis.size:
        raise ConfigError(
            f"{what}={size} is not divisible by tensor_size={axis.size}; choose a tensor size that divides it"
        )
    return size // axis.size


class SplitLinear(nn.Module):
    """A module whose linear layers are split along the tensor axis.

    `traced` is what torch traces instead of them, if they send anything.
    """

    traced: Linears | None = None
    products: Products = OWN_PRECISION

    def __init__(self, tokens: TokenLayout):
        super().__init__()
        self.tokens = tokens

    def columns(self, x: Tensor, weights: Tensors, biases: Tensors) -> Tensors:
        """Apply several column-parallel layers to one input, which is gathered once, as is its gradient reduced.

        `biases` has as many tensors as `weights`, or none.
        """
        if self.traced is not None and is_traced(x):
            return self.traced(x, weights, biases)
        return _ColumnLinears.apply(x, Split(self.tokens, self.products), len(weights), *weights, *biases)


class ColumnParallelLinear(SplitLinear):
    """A linear layer, (tokens of this rank, in) -> (all tokens, out / size).

    Each rank has its rows of weight (out, in) and of bias (out,), if it has one.
    """

    split_dims: ClassVar = {"weight": 0, "bias": 0}

    def __init__(self, in_features: int, out_features: int, tokens: TokenLayout, has_bias: bool = True):
        super().__init__(tokens)
        own_features = part_of(out_features, tokens.axis, "the number of output features")
        self.weight = nn.Parameter(torch.empty(own_features, in_features))
        self.bias = nn.Parameter(torch.empty(own_features)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        (y,) = self.columns(x, [self.weight], [] if self.bias is None else [self.bias])
        return y


class RowParallelLinear(SplitLinear):
    """A linear layer, (all tokens, in / size) -> (tokens of this rank, out).

    Each rank has its columns of weight (out, in) and the whole bias (out,), if there is one.
    """

    split_dims: ClassVar = {"weight": 1}

    def __init__(self, in_features: int, out_features: int, tokens: TokenLayout, has_bias: bool = True):
        super().__init__(tokens)
        own_features = part_of(in_features, tokens.axis, "the number of input features")
        self.weight = nn.Parameter(torch.empty(out_features, own_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.traced is not None and is_traced(x):
            return self.traced(x, [self.weight], [] if self.bias is None else [self.bias])[0]
        # The bias is added once in the sum over ranks, as part of the product: a pass of its own would take longer.
        bias = None if self.bias is None else _OnFirstRank.apply(self.bias, self.tokens.axis)
        return _Reduce.apply(self.products.linear(x, self.weight, bias), self.tokens)


class TokenDropout(nn.Module):
    """Dropout of this rank's tokens, with equal masks on ranks that hold the same tokens.

    `traced` is what torch.compile traces instead, if the ranks draw different numbers.
    """

    traced: Callable[[Tensor, float], Tensor] | None = None

    def __init__(self, probability: float, tokens: TokenLayout):
        super().__init__()
        self.probability, self.tokens = probability, tokens

    def forward(self, x: Tensor) -> Tensor:
        if not self.probability or not self.training:
            return x  # `dropout` would be traced as a copy
        if self.traced is not None and torch.compiler.is_compiling():
            return self.traced(x, self.probability)
        with self.tokens.random_stream():
            return F.dropout(x, self.probability)


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


def gathered_linear(x: Tensor, weight: Tensor, tokens: TokenLayout) -> Tensor:
    """Apply a linear layer without a bias, whose rows are divided, (tokens of this rank, in) -> (all tokens, out).

    The result's gradient must be equal on all ranks.
    """
    (y,) = _ColumnLinears.apply(x, Split(tokens, OWN_PRECISION), 1, weight)
    return _GatherColumns.apply(y, tokens.axis)


class Split(NamedTuple):
    """The layout of the tokens of a split layer, and its products."""

    tokens: TokenLayout
    products: Products


def column_products(x: Tensor, weights: Tensors, biases: Tensors, split: Split) -> list[Tensor]:
    """Return the outputs of column-parallel layers, without a graph."""
    whole, gathered = split.tokens.gather(x)
    gathered.wait()
    return split.products.outputs(whole, weights, biases)


def column_gradients(
    grads: Tensors,
    x: Tensor,
    weights: Tensors,
    split: Split,
    needed: tuple[bool, bool, bool] = (True, True, True),
) -> Gradients:
    """Return the gradients of the input, of the weights and of the biases of column-parallel layers.

    `needed` says of each of the three whether it is; what is not needed is None or an empty list. The gather overlaps
    with the first products, and the reduction with the others. All ranks launch the two collectives in this order.
    """
    needs_x, needs_weights, needs_biases = needed
    grad_x = reduced = None
    grad_weights: list[Tensor] = []
    if needs_weights:
        whole, gathered = split.tokens.gather(x)
    if needs_x:
        grad_x, reduced = split.tokens.reduce(split.products.input_gradient(grads, weights))
    if needs_weights:
        gathered.wait()
        grad_weights = split.products.weight_gradients(grads, whole)
    grad_biases = [grad.sum(0) for grad in grads] if needs_biases else []
    if reduced is not None:
        reduced.wait()
    return grad_x, grad_weights, grad_biases


def row_products(x: Tensor, weights: Tensors, biases: Tensors, split: Split) -> list[Tensor]:
    """Return the output of a row-parallel layer, without a graph."""
    if split.tokens.axis.rank > 0:
        biases = [torch.zeros_like(bias) for bias in biases]
    (partial_sums,) = split.products.outputs(x, weights, biases)
    sums, reduced = split.tokens.reduce(partial_sums)
    reduced.wait()
    return [sums]


def row_gradients(
    grads: Tensors, x: Tensor, weights: Tensors, split: Split, needed: tuple[bool, bool, bool]
) -> Gradients:
    """Return the gradients of a row-parallel layer: of its input, its weight, and its bias if that is needed."""
    whole, gathered = split.tokens.gather(grads[0])
    gathered.wait()
    of_x, of_weights = split.products.input_gradient([whole], weights), split.products.weight_gradients([whole], x)
    return of_x, of_weights, [whole.sum(0)] if needed[2] else []


class _ColumnLinears(torch.autograd.Function):
    """Linear layers that gather their input, and reduce its gradient while the weights' are computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, num_weights: int, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.split, weights, biases = split, list(params[:num_weights]), list(params[num_weights:])
        ctx.save_for_backward(x, *weights)  # only this rank's tokens: the others are gathered again
        return tuple(column_products(x, weights, biases, split))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, _, _, *of_params = ctx.needs_input_grad
        of_weights, of_biases = of_params[: len(weights)], of_params[len(weights) :]
        needed = of_x, any(of_weights), any(of_biases)
        grad_x, grad_weights, grad_biases = column_gradients(grads, x, weights, ctx.split, needed)
        grads_of_params: list[Tensor | None] = []
        grads_of_params += grad_weights or [None] * len(weights)
        grads_of_params += grad_biases or [None] * len(of_biases)
        return grad_x, None, None, *grads_of_params


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
    """The gather of (tokens, n) from every rank into (tokens, size * n)."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.gather_by_rank(own).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.axis.size, dim=-1)[ctx.axis.rank], None
