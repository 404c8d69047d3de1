"""The element-wise work of the loss: a softmax over rows of logits, and the gradient that takes the logits' place.

Both are computed in fp32 or wider. Compiled, each function is one kernel that reads a row once and keeps no copy of it.
Otherwise the copies in fp32 have a constant number of elements.

With a cap, the softmax is that of cap * tanh(logits / cap) (Gemma 2). With a z-loss, z_loss * log_sum^2 of each row is
added to what gradients are computed of (PaLM), which keeps the sums of exponentials near 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from parallel.torch_internals import active_dispatch_modes

ROWS_NUMEL = 2**24  # the elements of the rows that are copied to fp32 at once, unless the functions are compiled
CHUNK_TOKENS = 2048  # fewer would spend more on sums of the weight's gradient, more would need more memory
COPIES_OF_ROWS = 2  # the logits and their exponentials, or the derivative of the cap


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return the capped logits in fp32 or wider; without a cap, they may be the same memory."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype) if cap is None else (logits.to(dtype) / cap).tanh_() * cap


def cap_derivative(capped_logits: Tensor, cap: float) -> Tensor:
    """Return the derivative of what `capped` returns with respect to the logits."""
    return (capped_logits / cap).square_().neg_().add_(1)


@dataclass(frozen=True)
class Softmax:
    """The options of the functions of this module, and whether inductor compiles them.

    `chunk_tokens` is the largest number of tokens, of all ranks, whose logits exist at once.
    """

    is_compiled: bool = False
    cap: float | None = None
    z_loss: float = 0.0
    chunk_tokens: int = CHUNK_TOKENS

    def run(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call a function of this module with these options."""
        return prepared(function, self)(*tensors)


def log_sums(softmax: Softmax, logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials of each row, (rows,), of logits (rows, words).

    `Tensor.logsumexp` would make a copy of its own, beside that in fp32, which no observer of operations sees.
    """
    wide = capped(logits, softmax.cap)
    if not wide.shape[1]:  # all words of this rank are padding
        return wide.new_full((len(wide),), -math.inf)
    largest = wide.amax(-1, keepdim=True)
    exponentials = wide - largest if wide is logits else wide.sub_(largest)
    return (largest + exponentials.exp_().sum(-1, keepdim=True).log())[:, 0]


def to_gradients_(softmax: Softmax, logits: Tensor, sums: Tensor, factors: Tensor) -> None:
    """Replace the logits (rows, words) by the gradients of their `sums`, which log_sums returned.

    They are probabilities, times the factor of each row, if there is neither a cap nor a z-loss.
    """
    wide = capped(logits, softmax.cap)
    slopes = None if softmax.cap is None else cap_derivative(wide, softmax.cap)
    wide.sub_(sums[:, None]).exp_().mul_(_with_z_loss(factors, sums, softmax.z_loss)[:, None])
    if slopes is not None:
        wide.mul_(slopes)
    logits.copy_(wide)  # returns early if both are the same memory


def log_sums_to_gradients_(softmax: Softmax, logits: Tensor, factors: Tensor) -> Tensor:
    """Return the `log_sums` of the logits, and replace the logits as `to_gradients_` does."""
    wide = capped(logits, softmax.cap)
    slopes = None if softmax.cap is None else cap_derivative(wide, softmax.cap)
    largest = wide.amax(-1, keepdim=True)
    totals = wide.sub_(largest).exp_().sum(-1, keepdim=True)
    sums = (largest + totals.log())[:, 0]
    factors = _with_z_loss(factors, sums, softmax.z_loss)
    wide.mul_(factors[:, None] / totals)
    if slopes is not None:
        wide.mul_(slopes)
    logits.copy_(wide)
    return sums


def _with_z_loss(factors: Tensor, sums: Tensor, z_loss: float) -> Tensor:
    """Return the factors of rows whose loss contains z_loss * sums^2."""
    return factors * (1 + 2 * z_loss * sums) if z_loss else factors


@cache
def prepared(function: Callable[..., Any], softmax: Softmax) -> Callable[..., Any]:
    """Return the function of tensors that is `function` with the options, compiled or eager."""

    def with_options(*tensors: Tensor) -> Any:
        return function(softmax, *tensors)

    return compiled(with_options) if softmax.is_compiled else some_rows_at_once(with_options)


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
        Softmax(is_compiled=True).run(log_sums, torch.zeros(2, 8, device=device))
    except (RuntimeError, ImportError, OSError, SubprocessError):  # no triton, no C compiler, or too old a GPU
        return False
    return True
