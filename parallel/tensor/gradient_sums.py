"""Sums over the tensor axis of the gradients of replicated parameters that each rank applies to its own tokens only."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from parallel.mesh import Axis

MESSAGE_NUMEL = 2**24  # elements of a message of `sum_at_once`, which bounds its memory (C_B)


class GradientSums:
    """Sums the gradients of `params` over `axis`: each one in backward, by a hook, or all at once, by the optimizer.

    Keep it as an attribute of the module, where `set_deferred` finds it. Two messages for each layer and micro-batch
    would be as slow as their latency, so whoever accumulates the gradients can set `is_deferred`, which switches the
    hooks off, and call `sum_at_once` once a step. `dtype` is the data type of sums and messages; None: that of the
    gradients.
    """

    def __init__(self, params: Iterable[nn.Parameter], axis: Axis, dtype: torch.dtype | None = None):
        self.params, self._axis, self._dtype = list(params), axis, dtype
        self.is_deferred = False
        for param in self.params:
            param.register_hook(self._on_gradient)

    def sum_at_once(self, grads: Sequence[Tensor]) -> None:
        """Sum flat tensors over the axis, in place, in messages of a few. All ranks must give as many elements."""
        for some in _messages(grads):
            message = torch.cat([grad.to(self._dtype or grad.dtype) for grad in some])
            message = message.to(self._axis.communication_device(message))
            self._axis.all_reduce(message, out=message).wait()
            for grad, total in zip(some, message.split([grad.numel() for grad in some]), strict=True):
                grad.copy_(total)

    def _on_gradient(self, grad: Tensor) -> Tensor:
        if self.is_deferred:
            return grad
        total = torch.empty_like(grad, dtype=self._dtype, memory_format=torch.contiguous_format)
        self._axis.all_reduce(grad, out=total).wait()
        return total.to(grad.dtype)


def _messages(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of at most MESSAGE_NUMEL elements each, or of one tensor."""
    some: list[Tensor] = []
    for part in (part for grad in grads for part in grad.split(MESSAGE_NUMEL)):
        if sum(map(len, some)) + len(part) > MESSAGE_NUMEL:
            yield some
            some = []
        some.append(part)
    if some:
        yield some


def set_deferred(module: nn.Module, is_deferred: bool) -> list[GradientSums]:
    """Switch the hooks of all sums in a module off, or on again; return these sums."""
    found = [value for part in module.modules() for value in vars(part).values() if isinstance(value, GradientSums)]
    for sums in found:
        sums.is_deferred = is_deferred
    return found
