"""Cross-entropy of logits whose vocabulary is split along the tensor axis: no rank ever holds a whole row.

Each rank reduces its columns to two numbers per token: the log of its sum of exponentials, and the target's logit, or 0
if another rank has it. From one all-gather of these every rank computes the loss. Backward recomputes the
probabilities, so that nothing of the logits' size is kept except the logits themselves. Both passes copy the logits, in
chunks of a constant number of elements (C_B in the paper), to fp32 or wider: the caller's logits are not changed.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parallel.mesh import Axis

CHUNK_NUMEL = 2**24
COPIES_OF_A_CHUNK = 2  # the logits and their exponentials


def cross_entropy(
    own_logits: Tensor, targets: Tensor, vocab_size: int, axis: Axis, chunk_numel: int | None = CHUNK_NUMEL
) -> Tensor:
    """Return the mean over tokens, 0-dim, for logits (tokens, padded vocabulary / size) and int64 targets (tokens,).

    Columns from `vocab_size` on are padding: their probability and gradient are zero. `chunk_numel` is the number of
    elements of a chunk, which has at least one row; None: one chunk of all rows.
    """
    return _CrossEntropy.apply(own_logits, targets, vocab_size, axis, chunk_numel)


def temporary_bytes(num_tokens: int, num_columns: int, chunk_numel: int | None = CHUNK_NUMEL) -> int:
    """Return the bytes that the fp32 copies of a chunk occupy while the loss or its gradient is computed."""
    return COPIES_OF_A_CHUNK * 4 * min(num_tokens, _rows_at_once(num_columns, num_tokens, chunk_numel)) * num_columns


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own_logits: Tensor, targets: Tensor, vocab_size: int, axis: Axis, chunk_numel: int | None
    ) -> Tensor:
        num_tokens, num_columns = own_logits.shape
        first = axis.rank * num_columns
        num_words = min(max(vocab_size - first, 0), num_columns)  # columns that are not padding
        own_targets = targets - first
        summaries = own_logits.new_empty(num_tokens, 2, dtype=torch.promote_types(own_logits.dtype, torch.float32))
        for rows, logits in _chunks(own_logits, summaries.dtype, num_words, chunk_numel):
            is_here, column = _locate(own_targets[rows], num_columns)
            torch.logsumexp(logits, dim=-1, out=summaries[rows, 0])
            summaries[rows, 1] = logits.gather(-1, column)[:, 0].masked_fill(~is_here, 0)
        all_summaries = summaries.new_empty(axis.size, num_tokens, 2)
        axis.all_gather(summaries, out=all_summaries).wait()
        log_sum, target_logit = all_summaries[..., 0].logsumexp(0), all_summaries[..., 1].sum(0)
        ctx.save_for_backward(own_logits, own_targets, log_sum)
        ctx.num_words, ctx.chunk_numel = num_words, chunk_numel
        return (log_sum - target_logit).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own_logits, own_targets, log_sum = ctx.saved_tensors
        grad_logits = torch.empty_like(own_logits)
        for rows, logits in _chunks(own_logits, log_sum.dtype, ctx.num_words, ctx.chunk_numel):
            is_here, column = _locate(own_targets[rows], own_logits.shape[-1])
            probabilities = logits.sub_(log_sum[rows, None]).exp_()
            probabilities.scatter_add_(-1, column, -is_here[:, None].to(probabilities.dtype))
            grad_logits[rows] = probabilities.mul_(grad / len(own_logits))
        return grad_logits, None, None, None, None


def _rows_at_once(num_columns: int, num_tokens: int, chunk_numel: int | None) -> int:
    return num_tokens if chunk_numel is None else max(1, chunk_numel // num_columns)


def _chunks(
    own_logits: Tensor, dtype: torch.dtype, num_words: int, chunk_numel: int | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, a copy of their logits in `dtype` with padding at -inf)."""
    num_tokens, num_columns = own_logits.shape
    num_rows = _rows_at_once(num_columns, num_tokens, chunk_numel)
    for start in range(0, num_tokens, num_rows):
        rows = slice(start, start + num_rows)
        logits = own_logits[rows].to(dtype, copy=True)
        logits[:, num_words:] = -torch.inf
        yield rows, logits


def _locate(own_targets: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return whether each target is among this rank's columns, (rows,), and its column, (rows, 1); 0 if it is not."""
    is_here = (own_targets >= 0) & (own_targets < num_columns)
    return is_here, own_targets.masked_fill(~is_here, 0)[:, None]
