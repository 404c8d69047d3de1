"""A transport as a third party would write it: gradients are sent in 8 bits, and what is rounded off is sent later."""

from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from parallel.mesh import Axis, Work
from zero.core.partition.layout import Ranges, Slice
from zero.core.protocols.gradient_sum import GradientSum
from zero.core.protocols.transport import Direct

LARGEST = 127


class EightBit(Direct):
    """`Direct` whose gradients are messages of one byte an element, and a scale for each rank's part of a bucket.

    Each rank adds the error of its last message to the next one (error feedback), so that errors do not add up. The
    errors take as much memory as the bucket.
    """

    def __init__(self, axis: Axis):
        super().__init__(axis)
        self.errors: Tensor | None = None

    def bind(self, ranges: Ranges, slices: Sequence[Slice] = ()) -> Self:
        bound = super().bind(ranges, slices)
        bound.errors = None
        return bound

    def scale(self, dtype: torch.dtype) -> float:
        return 1.0  # integers neither overflow nor vanish

    def holds_memory(self, dtype: torch.dtype) -> bool:
        return True

    def reduce(self, message: Tensor, total: GradientSum, *, is_last: bool) -> Work:
        if self.errors is None:
            self.errors = torch.zeros_like(message)
        parts = message.add_(self.errors).view(self.axis.size, -1)
        scales = parts.abs().amax(dim=1, keepdim=True).float().div_(LARGEST).clamp_(min=1e-30)
        codes = (parts / scales).round_().to(torch.int8)
        torch.sub(parts, codes * scales, out=self.errors.view_as(parts))
        self.errors.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # of a step that all ranks skip
        sent = torch.cat([scales.view(torch.int8), codes], dim=1).view(-1)
        return self.axis.exchange(sent, partial(self._add, total, is_last))

    def _add(self, total: GradientSum, is_last: bool, received: Tensor) -> None:
        """Add the parts of all ranks, (ranks, 4 + n) bytes."""
        scales, codes = received[:, :4].contiguous().view(torch.float32), received[:, 4:]
        total.add((codes * scales).sum(dim=0), 1 / self.num_ranks, is_last=is_last)
