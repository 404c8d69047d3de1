"""Context parallelism: the tokens of a sequence are divided over the ranks of an axis (DeepSpeed-Ulysses, section 3).

    rank r has the r-th stretch of each sequence     q, k, v: all heads, own tokens
              | all-to-all
    attention of a few heads over all tokens         q, k, v: own heads, all tokens
              | all-to-all
    the output for the own stretch                   all heads, own tokens

All other layers compute tokens one by one, so nothing else communicates. The weights are those of data parallelism: the
ranks of a context axis are neighbours on the data axis, along which ZeRO shards the states and sums the gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError

HEADS, TOKENS = 1, 2  # dims of (batch, heads, tokens, head_dim)
Kernel = Callable[..., Tensor]


def over_context(kernel: Kernel, axis: Axis) -> Kernel:
    """Return an attention kernel for q, k and v of a stretch of tokens, (batch, heads, own tokens, head_dim) each.

    `kernel` is called with all tokens of this rank's part of the heads, and what else is passed. k and v may have fewer
    heads than q. On an axis of size 1 it is `kernel` itself.
    """
    if axis.size == 1:
        return kernel

    def run(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        attended = kernel(*_Exchange.apply(axis, HEADS, TOKENS, q, k, v), *others)
        return _Exchange.apply(axis, TOKENS, HEADS, attended)[0]

    return run


def own_stretch(sequences: Tensor, axis: Axis) -> Tensor:
    """Return this rank's stretch of (batch, tokens); the axis divides the number of tokens."""
    return sequences if axis.size == 1 else sequences.chunk(axis.size, dim=1)[axis.rank]


def whole_sequences(own: Tensor, axis: Axis) -> Tensor:
    """Gather the stretches (batch, own tokens, n) of all ranks into (batch, tokens, n). It has no gradient."""
    if axis.size == 1:
        return own
    return axis.gather_by_rank(own).movedim(0, 1).flatten(1, 2)


def check_context(axis: Axis, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError unless the axis divides the sizes {name: heads of a tensor rank, or tokens of a sequence}."""
    for name, size in sizes.items():
        if size % axis.size:
            raise ConfigError(f"context_size={axis.size} does not divide the {size} {name}; choose a size that does")


class _Exchange(torch.autograd.Function):
    """All-to-all of several tensors in one message: each is divided along one dim and put together along another.

    Its gradient is the exchange with both dims swapped.
    """

    @staticmethod
    def forward(ctx: Any, axis: Axis, divided: int, joined: int, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.divided, ctx.joined = axis, divided, joined
        return tuple(exchange(axis, divided, joined, parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *exchange(ctx.axis, ctx.joined, ctx.divided, grads)


def exchange(axis: Axis, divided: int, joined: int, parts: Sequence[Tensor]) -> list[Tensor]:
    """Send the r-th part along `divided` of each tensor to rank r, and join what all ranks send along `joined`.

    The tensors differ in the number of heads only.
    """
    pieces = [part.unflatten(divided, (axis.size, -1)).movedim(divided, 0) for part in parts]  # (ranks, batch, h, t, d)
    num_heads = [piece.shape[1 + HEADS] for piece in pieces]
    sent = torch.cat(pieces, dim=1 + HEADS)
    received = torch.empty_like(sent)
    numels = [sent.numel() // axis.size] * axis.size
    flat = sent.view(-1), received.view(-1)
    axis.all_to_all(flat[0], numels, out=flat[1], out_numels=numels, total_numel=sent.numel() * axis.size).wait()
    return [piece.movedim(0, joined).flatten(joined, joined + 1) for piece in received.split(num_heads, dim=1 + HEADS)]
