"""The element-wise work of the loss: a softmax over rows of logits, and the gradient that takes the logits' place.

Both are computed in fp32 or wider. Compiled, each function is one kernel that reads a row once and keeps no copy of it.
Otherwise the copies in fp32 have a constant number of elements.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from parallel.torch_internals import active_dispatch_modes

ROWS_NUMEL = 2**24  # the elements of the rows that are copied to fp32 at once, unless the functions are compiled
COPIES_OF_ROWS = 2  # the logits and their exponentials


def log_sums(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials of each row, (rows,), of logits (rows, words)."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)


def to_probabilities_(logits: Tensor, sums: Tensor, factors: Tensor) -> None:
    """Replace the logits (rows, words) by probabilities times the factor of each row; `sums` are those of log_sums."""
    logits.copy_((logits - sums[:, None]).exp_().mul_(factors[:, None]))


def log_sums_to_probabilities_(logits: Tensor, factors: Tensor) -> Tensor:
    """Return the `log_sums` of the logits, and replace the logits by probabilities times the factor of each row."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # the logits themselves if they are not half
    largest = wide.amax(-1, keepdim=True)
    sums = wide.sub_(largest).exp_().sum(-1, keepdim=True)
    logits.copy_(wide.mul_(factors[:, None] / sums))  # returns early if both are the same memory
    return (largest + sums.log_())[:, 0]


@dataclass(frozen=True)
class Softmax:
    """The three functions of this module, compiled or eager."""

    log_sums: Callable[[Tensor], Tensor]
    to_probabilities_: Callable[[Tensor, Tensor, Tensor], None]
    log_sums_to_probabilities_: Callable[[Tensor, Tensor], Tensor]


@cache
def softmax(is_compiled: bool) -> Softmax:
    """Return the functions, compiled by inductor or eager."""
    prepare = compiled if is_compiled else some_rows_at_once
    return Softmax(prepare(log_sums), prepare(to_probabilities_), prepare(log_sums_to_probabilities_))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled; while single operations are observed, which cannot be compiled, it runs eager."""
    fast, eager = torch.compile(function), some_rows_at_once(function)
    return lambda *tensors: (eager if active_dispatch_modes() else fast)(*tensors)


def some_rows_at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors with equal numbers of rows that calls `function` with some rows at a time."""

    def call(logits: Tensor, *others: Tensor) -> Any:
        num_rows = rows_at_once(logits.shape[1])
        parts = zip(*(tensor.split(num_rows) for tensor in (logits, *others)), strict=True)
        results = [function(*part) for part in parts]
        return results[0] if len(results) == 1 else torch.cat(results) if results[0] is not None else None

    return call


def rows_at_once(num_words: int) -> int:
    """Return the number of rows that the eager functions copy to fp32 at once."""
    return max(1, ROWS_NUMEL // max(1, num_words))


def inductor_works(device: torch.device) -> bool:
    """Return whether inductor can compile for the device; False for a CPU, where compiling would take long."""
    if device.type != "cuda":
        return False
    try:
        softmax(is_compiled=True).log_sums(torch.zeros(2, 8, device=device))
    except (RuntimeError, ImportError, OSError, SubprocessError):  # no triton, no C compiler, or too old a GPU
        return False
    return True
