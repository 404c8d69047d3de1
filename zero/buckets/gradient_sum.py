"""The gradients of a bucket that a rank keeps: their sum over micro-batches, and in the end the mean over ranks.

rest    the elements that the rank keeps, on the accelerator or in host memory: a view of the full gradients if these
        persist and the sum is placed on the accelerator, else memory of its own
own     the elements that the rank updates, a view of it

A transport gives reduced messages to it by `add`, wherever it is placed. Transports that make a mean only at the end of
a step have `set_mean`, `on_accelerator` and `summed_here` as well (`Transport.adds_means`). Values of any type are
rounded to that of the sum; those of the message may be overwritten.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind
from parallel.mesh import Work
from zero.memory.placement import Offload, Placement
from zero.memory.staging import free_storage, restore_storage
from zero.partition.layout import Ranges, cut, overlap
from zero.partition.stage import GradientTypes, Lifetime, ShardingPolicy


@dataclass(frozen=True)
class GradientPath:
    """The memories through which the gradients of a bucket go: full gradients -> message -> sum."""

    types: GradientTypes
    policy: ShardingPolicy
    placement: Placement
    """The memory of the sum."""

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

    @property
    def casts_for_host(self) -> bool:
        """True if a reduced message is cast before it is copied to the host."""
        return self.placement is Placement.HOST and self.types.accumulate is not self.types.reduce

    @property
    def owns_staged(self) -> bool:
        """True if the sum is a view of the full gradients."""
        return self.persists and self.placement is Placement.ACCELERATOR

    @property
    def frees_sum(self) -> bool:
        """True if the sum is freed between steps; pinned memory stays, because it is expensive to allocate."""
        is_apart = not self.persists and self.placement is Placement.ACCELERATOR
        return is_apart and self.policy.owned_grads is Lifetime.TRANSIENT


class GradientSum:
    """The sum of a bucket's gradients over the micro-batches of a step, as far as a rank keeps it."""

    def __init__(self, ranges: Ranges, path: GradientPath, offload: Offload, *, adds_means: bool):
        """`adds_means`: of the transport. Call `place` before anything else."""
        self.ranges, self.path, self._offload, self._adds_means = ranges, path, offload, adds_means
        self.has_sum = False
        self.host_copy = Work()  # of the last message; waited for before its memory is overwritten
        self._aside: Tensor | None = None  # the mean of an earlier step that is added to the next one

    @property
    def is_empty(self) -> bool:
        """True if nothing has been reduced since the last update."""
        return not self.has_sum and self._aside is None

    @property
    def begins_anew(self) -> bool:
        """True if a backward after the last one of its step would overwrite the mean, or divide it again."""
        return self.has_sum and (self.path.persists or not self._adds_means)

    def place(self, placement: Placement, full: Tensor | None) -> None:
        """Move the sum to one of the memories; `full`: full gradients that persist. The values are lost."""
        self.path = path = replace(self.path, placement=placement)
        if path.owns_staged:
            assert full is not None
            self.rest = self.ranges.of_bucket(full, self.ranges.rest)
        else:
            self.rest = self._new(placement, len(self.ranges.rest)).zero_()
        self.own = self.ranges.own_of(self.rest)
        self.free()

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
        if self.path.placement is Placement.ACCELERATOR:
            yield self.rest
            return
        fetched, total = self._take()
        # The reader waits for the copy on the device, and the host waits for nothing.
        self._offload.to_accelerator(self.rest, out=total).wait()
        yield total
        self._offload.gradients.put_back(fetched, last_read())

    @contextmanager
    def summed_here(self, *, is_last: bool) -> Iterator[Tensor]:
        """Yield memory of `rest` on the accelerator, with the sum if there is one, which the caller adds to or sets."""
        if self.path.placement is Placement.ACCELERATOR:
            if self.path.frees_sum:
                restore_storage(self.rest)
            yield self.rest
            self._end_sum(self.rest, is_last=is_last)
            return
        buffer, total = self._take()
        if self.has_sum:
            self._offload.to_accelerator(self.rest, out=total).wait()
        yield total
        self._end_sum(total, is_last=is_last)
        self.host_copy = self._offload.to_host(total, out=self.rest)
        self._offload.gradients.put_back(buffer, self.host_copy)

    def set_aside(self) -> None:
        """Keep a mean while another backward runs; the next mean is added to it.

        Call `Offload.synchronize` first if it is in host memory: the host reads it.
        """
        if self.path.owns_staged or not self._adds_means:  # the next gradients would overwrite it, or be divided
            self._aside = self._new(self.path.placement, self.own.numel()).copy_(self.own)
            self.has_sum = False

    def free(self) -> None:
        """Discard the sum; free its memory too, unless that is allocated for the whole run (M_D)."""
        self.has_sum, self._aside = False, None
        if self.path.frees_sum:
            free_storage(self.rest)

    def discard(self, parts: Iterable[range]) -> None:
        """Set some elements of the bucket to zero."""
        held = [(self.rest, self.ranges.rest)] if self.has_sum else []
        if self._aside is not None:
            held.append((self._aside, self.ranges.own))
        for (tensor, own), part in product(held, parts):
            if elements := overlap(part, own):
                cut(tensor, elements, own.start).zero_()

    def _receive(self, values: Tensor, out: Tensor, scale: float, *, adds: bool, is_last: bool) -> None:
        if self.path.placement is Placement.ACCELERATOR:
            if adds:
                out.add_(values, alpha=scale)
            else:
                if self.path.frees_sum:
                    restore_storage(self.rest)
                scale_into(out, values, scale)
            self._end_sum(out, is_last=is_last)
            return
        total, cast = values, None
        if self.path.casts_for_host:
            cast = self._offload.gradients.take(self.path.types.accumulate)
            total = cast[: values.numel()]
        scale_into(total, values, scale)
        if adds:
            with self.on_accelerator(Work) as earlier:
                total.add_(earlier)
        self._end_sum(total, is_last=is_last)
        self.host_copy = self._offload.to_host(total, out=out)
        if cast is not None:
            self._offload.gradients.put_back(cast, self.host_copy)

    def _end_sum(self, total: Tensor, *, is_last: bool) -> None:
        """Add what was set aside to a mean on the accelerator, of `rest` or `own`."""
        self.has_sum = True
        if not is_last or self._aside is None:
            return
        aside, self._aside = self._aside, None
        if self.path.placement is Placement.HOST:  # copied back, so that the host does not wait for the device
            fetched = self._new(Placement.ACCELERATOR, aside.numel())
            self._offload.to_accelerator(aside, out=fetched).wait()
            aside = fetched
        own = total if total.numel() == aside.numel() else self.ranges.own_of(total)
        own.add_(aside)

    def _take(self) -> tuple[Tensor, Tensor]:
        """Return a buffer on the accelerator, and a view of it as long as `rest`."""
        buffer = self._offload.gradients.take(self.path.types.accumulate)
        return buffer, buffer[: self.rest.numel()]

    def _new(self, placement: Placement, numel: int) -> Tensor:
        return self._offload.new(placement, TensorKind.GRADIENTS, numel, self.path.types.accumulate)


def scale_into(out: Tensor, values: Tensor, scale: float) -> Tensor:
    """Set `out` to `scale` times `values`, in place if both are the same memory, and return it."""
    if scale == 1:
        return out.copy_(values)  # returns early if both are the same memory
    if torch.promote_types(out.dtype, values.dtype) is values.dtype:
        return torch.mul(values, scale, out=out)  # scaled before it is cast to a smaller type, in which it may overflow
    return out.copy_(values).mul_(scale)  # `torch.mul` would round the product to the type of `values`
