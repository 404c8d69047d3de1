"""The head and the loss at once: the mean cross-entropy of logits that never exist for all tokens.

    for each chunk of tokens    logits = x @ weight.T    each rank's words of the vocabulary
                                the loss; the gradient takes the logits' place, times the loss scale
                                gradient of x = that @ weight;    gradient of weight += that.T @ x, summed in fp32

No rank holds a whole row of the logits: it reduces its words to two numbers a token, the log of its sum of exponentials
and the target's logit, or 0 if another rank has it. From one all-gather of these every rank computes the loss.

The gradients are computed in forward, because they need the logits: to compute those again would be a third of the
products more. Backward multiplies by the incoming gradient, and reads no parameter: stage 3 gathers nothing for it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.mesh import Axis, Work
from parallel.tensor.softmax import (
    CHUNK_TOKENS,
    COPIES_OF_ROWS,
    Softmax,
    cap_derivative,
    capped,
    log_sums,
    log_sums_to_gradients_,
    rows_at_once,
    to_gradients_,
)
from parallel.tensor.token_layout import TokenLayout
from parallel.torch_internals import FakeTensor

EAGER = Softmax()


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    tokens: TokenLayout,
    *,
    loss_scale: Tensor | None = None,
    softmax: Softmax = EAGER,
) -> Tensor:
    """Return the mean loss, 0-dim, of the logits `x @ weight.T`, in fp32 or wider.

    `x` is (tokens of this rank, features), `weight` (padded vocabulary / size, features), and `targets` are the int64
    words of all tokens. The mean is over targets that are not negative. Words from `vocab_size` on are padding: their
    probability and gradient are zero. A target among them makes the loss infinite, and gradients NaN.

    If the loss is to be multiplied before backward, pass the factor as `loss_scale`, 0-dim: gradients in half precision
    are then computed with it, so that they do not underflow. They are right for any other factor too.

    `softmax` has the options of the loss. A z-loss changes the gradients only: what is returned is the cross-entropy,
    which can be compared with that of any other model.
    """
    scale = targets.new_ones((), dtype=torch.float32) if loss_scale is None else loss_scale
    head = _Head(vocab_size, tokens, softmax, torch.is_grad_enabled())
    return _LinearCrossEntropy.apply(x, weight, targets, scale, head)


def temporary_bytes(num_tokens: int, weight: Tensor, softmax: Softmax = EAGER) -> int:
    """Return the bytes that the logits of a chunk, copies in fp32 and sums of the weight's gradient occupy."""
    num_words, num_chunks = len(weight), _num_chunks(num_tokens, softmax.chunk_tokens)
    num_rows = rows_of_chunks(num_tokens, softmax.chunk_tokens)[0]
    wide_itemsize = _wide(weight.dtype).itemsize
    rows_copied = 0 if softmax.is_compiled else COPIES_OF_ROWS * min(num_rows, rows_at_once(num_words))
    copies = rows_copied * num_words * wide_itemsize
    sums = weight.numel() * wide_itemsize if num_chunks > 1 else weight.nbytes
    return num_rows * num_words * weight.itemsize + copies + sums


@dataclass(frozen=True)
class _Head:
    """The settings of a head, beside its tensors."""

    vocab_size: int
    tokens: TokenLayout
    softmax: Softmax
    computes_gradients: bool

    def chunks(self, x: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (this rank's tokens, the targets of all ranks' tokens) of each chunk."""
        num_chunks = max(1, min(_num_chunks(len(targets), self.softmax.chunk_tokens), len(x)))
        of_all = targets.view(self.tokens.num_parts, -1)
        parts = zip(x.tensor_split(num_chunks), of_all.tensor_split(num_chunks, dim=1), strict=True)
        return [(own, chunk.flatten()) for own, chunk in parts]

    def gathered(self, chunks: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (all ranks' tokens, their targets) of each chunk; the next one is gathered while one is computed."""
        ahead = self.tokens.gather(chunks[0][0])
        for number, (_, targets) in enumerate(chunks):
            whole, gathered = ahead
            if number + 1 < len(chunks):
                ahead = self.tokens.gather(chunks[number + 1][0])
            gathered.wait()
            yield whole, targets

    def run(self, x: Tensor, weight: Tensor, targets: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (logits of this rank's words, the loss of each token), the loss being 0 if a target is left out.

        With a factor, the logits are replaced by their gradients times this factor.
        """
        is_counted, is_unknown, logits = targets >= 0, targets >= self.vocab_size, F.linear(x, weight)
        factors = None if factor is None else (is_counted * factor).masked_fill_(is_unknown, math.nan)
        losses = self.losses(logits, targets, factors).masked_fill_(is_unknown, math.inf)
        return logits, losses.masked_fill_(~is_counted, 0)

    def losses(self, logits: Tensor, targets: Tensor, factors: Tensor | None) -> Tensor:
        """Return the loss of each token; replace the logits by their gradients times the factor of each token."""
        axis, num_words = self.tokens.axis, logits.shape[1]
        own_targets = targets - axis.rank * num_words
        is_here = (own_targets >= 0) & (own_targets < num_words)
        column = own_targets.masked_fill(~is_here, 0)[:, None]
        target_logit = capped(logits.gather(1, column)[:, 0].masked_fill(~is_here, 0), self.softmax.cap)
        # A view without the padding: writing -inf there would be a pass of its own if the functions are compiled.
        words = logits[:, : max(self.vocab_size - axis.rank * num_words, 0)]
        if factors is not None and axis.size == 1:
            sums = self.softmax.run(log_sums_to_gradients_, words, factors)
        else:
            sums, target_logit = _over_ranks(self.softmax.run(log_sums, words), target_logit, axis)
            if factors is not None:
                self.softmax.run(to_gradients_, words, sums, factors)
        losses = sums - target_logit
        if factors is not None:
            if words.shape[1] < num_words:
                logits[:, words.shape[1] :] = 0
            at_target = self.gradient_at_target(losses, sums, target_logit).mul_(factors).to(logits.dtype)[:, None]
            logits.scatter_(1, column, torch.where(is_here[:, None], at_target, logits.gather(1, column)))
        return losses

    def gradient_at_target(self, losses: Tensor, sums: Tensor, target_logit: Tensor) -> Tensor:
        """Return the gradient of each token's loss with respect to its target's logit: the probability less 1."""
        softmax, gradient = self.softmax, torch.expm1(-losses)
        if softmax.z_loss:
            gradient += 2 * softmax.z_loss * sums * torch.exp(-losses)
        if softmax.cap is not None:
            gradient *= cap_derivative(target_logit, softmax.cap)
        return gradient


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, head: _Head) -> Tensor:
        needs_x, needs_weight = (head.computes_gradients and needed for needed in ctx.needs_input_grad[:2])
        num_counted = (targets >= 0).sum(dtype=_wide(x.dtype))
        factor = scale / num_counted.clamp(min=1) if needs_x or needs_weight else None
        chunks = head.chunks(x, targets)
        losses, grads_x, reduced, grad_weight = [], [], Work(), None
        for whole, chunk_targets in head.gathered(chunks):
            logits, own_losses = head.run(whole, weight, chunk_targets, factor)
            losses.append(own_losses)
            # Each reduction runs while the product for the weight and those of the next chunk do.
            if needs_x:
                reduced.wait()
                grad_x, reduced = head.tokens.reduce(logits @ weight)
                grads_x.append(grad_x)
            if needs_weight:
                is_all = len(chunks) == 1
                grad_weight = logits.t() @ whole if is_all else _add_product(grad_weight, logits.t(), whole)
            del logits  # before the next chunk's exist
        reduced.wait()
        ctx.dtype = weight.dtype
        ctx.save_for_backward(scale, grad_weight, *grads_x)
        return torch.cat(losses).sum() / num_counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # `create_graph`: the gradients were computed in forward, without a graph
            raise RuntimeError(
                "the loss of a GPT has no second derivatives; pass no targets, and compute the loss from the logits"
            )
        scale, grad_weight, *grads_x = ctx.saved_tensors
        # 1 if the loss was multiplied by the scale. Without dims, a GPU would round it to the precision of a part.
        factor = (grad / scale)[None, None]
        grad_x = None
        if grads_x:
            grad_x = grads_x[0].new_empty(sum(map(len, grads_x)), grads_x[0].shape[1])
            for part, rows in zip(grads_x, grad_x.split([len(part) for part in grads_x]), strict=True):
                torch.mul(part, factor, out=rows)
        if grad_weight is not None:
            grad_weight = torch.mul(grad_weight, factor, out=torch.empty_like(grad_weight, dtype=ctx.dtype))
        return grad_x, grad_weight, None, None, None


def _over_ranks(own_sums: Tensor, own_target_logit: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return (the log of the sum of exponentials, the target's logit) over all ranks' words."""
    own = torch.stack([own_sums, own_target_logit], dim=-1)
    of_all = axis.gather_by_rank(own)
    return of_all[..., 0].logsumexp(0), of_all[..., 1].sum(0)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix `total + a @ b` in fp32 or wider, in place; None stands for zeros."""
    beta = 0 if total is None else 1  # with 0, what the memory of `total` holds does not matter
    if total is None:
        total = a.new_empty(len(a), b.shape[1], dtype=_wide(a.dtype))
    if total.dtype == a.dtype:
        return torch.addmm(total, a, b, beta=beta, out=total)
    if total.is_cuda or isinstance(total, FakeTensor):
        return torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    # Torch has no product of half precision with a sum in fp32 on a CPU: some rows at a time are cast.
    b = b.to(total.dtype)
    for rows, some in zip(total.split(rows_at_once(a.shape[1])), a.split(rows_at_once(a.shape[1])), strict=True):
        torch.addmm(rows, some.to(total.dtype), b, beta=beta, out=rows)
    return total


def rows_of_chunks(num_tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> list[int]:
    """Return the different numbers of tokens that chunks have, the largest first."""
    num_chunks = _num_chunks(num_tokens, chunk_tokens)
    return sorted({math.ceil(num_tokens / num_chunks), num_tokens // num_chunks}, reverse=True)


def _num_chunks(num_tokens: int, chunk_tokens: int) -> int:
    return max(1, math.ceil(num_tokens / chunk_tokens))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the loss: that of the logits, or fp32 if it is wider."""
    return torch.promote_types(dtype, torch.float32)
