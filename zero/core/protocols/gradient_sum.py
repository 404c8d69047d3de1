"""The gradients of a bucket that a rank keeps: their sum over micro-batches, and in the end the mean over ranks.

rest    the elements that the rank keeps, in the home of the optimizer's states: a view of the full gradients if these
        persist and that is the accelerator, else memory of its own
own     the elements that the rank updates, a view of it

A transport gives reduced messages to it by `add`, wherever it is. Transports that make a mean only at the end of a step
may also call `set_mean`, `on_accelerator` and `summed_here` of it (`Transport.gives_means`). Values of any type are
rounded to that of the sum; those of the message may be overwritten.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.mesh import Work
from zero.core.memory.allocators import Allocate
from zero.core.memory.staging import free_storage, restore_storage
from zero.core.partition.layout import Ranges
from zero.core.partition.stage import GradientTypes, Lifetime, ShardingPolicy


@dataclass(frozen=True)
class GradientPath:
    """The types of a bucket's gradients on their way: full gradients -> message -> sum, and what is stored of them."""

    types: GradientTypes
    policy: ShardingPolicy

    @property
    def persists(self) -> bool:
        """True if full gradients have memory of their own; else they are staged in a buffer of the pool."""
        return self.policy.full_grads is Lifetime.PERSISTENT

    @property
    def staged_type(self) -> torch.dtype:
        """The type of the full gradients."""
        return self.types.accumulate if self.persists else self.types.reduce

    @property
    def casts_message(self) -> bool:
        """True if the full gradients are cast into a buffer of the pool, which is then reduced."""
        return self.staged_type is not self.types.reduce


class GradientSum:
    """The sum of a bucket's gradients over the micro-batches of a step, as far as a rank keeps it: on the accelerator.

    The sum of another home is a subclass (`Home.gradient_sum`).
    """

    is_apart = False
    """True if the sum is not in the memory of the accelerator."""

    def __init__(self, ranges: Ranges, path: GradientPath, new: Allocate, full: Tensor | None, *, gives_means: bool):
        """Allocate by `new`; `full`: full gradients that persist; `gives_means`: of the transport."""
        self.ranges, self.path, self._allocate, self._adds_means = ranges, path, new, gives_means
        self.has_sum = False
        self.last_read = Work()  # of the last message; waited for before its memory is overwritten
        self._aside: Tensor | None = None  # the mean of an earlier step that is added to the next one
        self.owns_staged = path.persists and not self.is_apart
        """True if the sum is a view of the full gradients."""
        # Pinned memory stays allocated between steps, because it is expensive to allocate.
        self._is_freed = not (path.persists or self.is_apart) and path.policy.owned_grads is Lifetime.TRANSIENT
        if self.owns_staged:
            assert full is not None
            self.rest = ranges.of_bucket(full, ranges.rest)
        else:
            self.rest = self._new(len(ranges.rest)).zero_()
        self.own = ranges.own_of(self.rest)
        self.free()

    @property
    def is_empty(self) -> bool:
        """True if nothing has been reduced since the last update."""
        return not self.has_sum and self._aside is None

    @property
    def is_final_mean(self) -> bool:
        """True if a backward after the last one of its step would overwrite the mean, or divide it again."""
        return self.has_sum and (self.path.persists or not self._adds_means)

    def add(self, values: Tensor, scale: float, *, is_last: bool) -> None:
        """Add `scale` times values of all elements of `rest`, on the accelerator; `is_last` of the step."""
        self._receive(values, self.rest, scale, adds=self.has_sum, is_last=is_last)

    def set_mean(self, values: Tensor, scale: float) -> None:
        """Set `own` to `scale` times values that have the sum of all micro-batches already."""
        self._receive(values, self.own, scale, adds=False, is_last=True)

    @contextmanager
    def on_accelerator(self, last_read: Callable[[], Work]) -> Iterator[Tensor]:
        """Yield the sum to be read on the accelerator: `rest` itself, or a copy.

        `last_read` is the `device_work` of the side stream on which it is read, or `Work` for the computation's stream.
        """
        yield self.rest

    @contextmanager
    def summed_here(self, *, is_last: bool) -> Iterator[Tensor]:
        """Yield memory of `rest` on the accelerator, with the sum if there is one, which the caller adds to or sets."""
        self._restore()
        yield self.rest
        self._end_sum(self.rest, is_last=is_last)

    def set_aside(self) -> None:
        """Keep a mean while another backward runs; the next mean is added to it.

        Call `Home.settle` first: the device of the home reads it.
        """
        self._aside = self._new(self.own.numel()).copy_(self.own)
        self.has_sum = False

    def free(self) -> None:
        """Discard the sum; free its memory too, unless that is allocated for the whole run (M_D)."""
        self.has_sum, self._aside = False, None
        if self._is_freed:
            free_storage(self.rest)

    def _receive(self, values: Tensor, out: Tensor, scale: float, *, adds: bool, is_last: bool) -> None:
        if adds:
            out.add_(values, alpha=scale)
        else:
            self._restore()
            scale_into(out, values, scale)
        self._end_sum(out, is_last=is_last)

    def _restore(self) -> None:
        if self._is_freed:
            restore_storage(self.rest)

    def _end_sum(self, total: Tensor, *, is_last: bool) -> None:
        """Add what was set aside to a mean on the accelerator, of `rest` or `own`."""
        self.has_sum = True
        if not is_last or self._aside is None:
            return
        aside, self._aside = self._fetched(self._aside), None
        own = total if total.numel() == aside.numel() else self.ranges.own_of(total)
        own.add_(aside)

    def _fetched(self, aside: Tensor) -> Tensor:
        """Return what was set aside, on the accelerator."""
        return aside

    def _new(self, numel: int) -> Tensor:
        return self._allocate(numel, self.path.types.accumulate)


def scale_into(out: Tensor, values: Tensor, scale: float) -> Tensor:
    """Set `out` to `scale` times `values`, in place if both are the same memory, and return it."""
    if scale == 1:
        return out.copy_(values)  # returns early if both are the same memory
    if torch.promote_types(out.dtype, values.dtype) is values.dtype:
        return torch.mul(values, scale, out=out)  # scaled before it is cast to a smaller type, in which it may overflow
    return out.copy_(values).mul_(scale)  # `torch.mul` would round the product to the type of `values`
