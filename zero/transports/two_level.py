"""Groups of ranks that divide the states, such as nodes, and replicate each other: two axes for one bucket.

in each micro-batch but the last    message -> reduce-scatter in the group -> added to the sum, undivided
and in the last one of a step       message -> the same, + the sum -> reduced between groups -> times 1/N -> own

Along the inner axis first: then a rank sends only what it keeps between groups, and only once a step. Between groups,
the ranks that own the same elements all-reduce them; if they own a part each, they reduce-scatter them, and gather
updated parameters between groups once a step.
"""

import math
from functools import partial
from typing import Self

import torch
from torch import Tensor

from parallel.mesh import Axis, Work
from zero.core.memory.streams import SideStream
from zero.core.protocols.gradient_sum import GradientSum
from zero.core.protocols.transport import Transport, after, all_reduce


class TwoLevel(Transport):
    """The ranks of `inner` divide each bucket for what they keep of it, and `owners` for what they update.

    `outer` has the ranks at the same place of every group, and `data` all of them. Owners are those of `inner`, or,
    with `over_all`, all ranks.
    """

    gives_means = False
    _between_groups: SideStream

    def __init__(
        self,
        data: Axis,
        inner: Axis,
        outer: Axis,
        *,
        over_all: bool = False,
        in_fp32: bool = False,
    ):
        super().__init__(data, in_fp32=in_fp32)
        self.inner, self.outer = inner, outer
        self.gathered_along, self.reduced_along = inner, (inner, outer)
        self.owners = self.counted = data if over_all else inner
        self.replicas = data.without_peers() if over_all else outer

    def grain(self, alignment: int) -> int:
        # Replicas cut what they keep into equal parts: to add it in one order, or to all-reduce it in fp32.
        num_cuts = self.outer.size if self.in_fp32 or self.is_rank_invariant else 1
        return self.num_shards * math.lcm(self.num_parts * alignment, num_cuts)

    def open(self, device: torch.device, *, keeps_full: bool) -> Self:
        opened = super().open(device, keeps_full=keeps_full)
        opened._between_groups = SideStream(device)
        return opened

    def publish(self, own: Tensor, rest: Tensor) -> Work:
        return self.outer.all_gather(own, out=rest)

    def gather(self, rest: Tensor, full: Tensor, room: Tensor | None = None) -> Work:
        return self.inner.all_gather(rest, out=full)

    def reduce(self, message: Tensor, total: GradientSum, *, is_last: bool) -> Work:
        rest, dtype = self.ranges.of_bucket(message, self.ranges.rest), message.dtype
        reduced = self.inner.reduce_scatter(message, out=rest, in_fp32=self.in_fp32)
        if is_last:
            if self._adds(self.outer, dtype):  # allocated on the side stream, no forward could use its memory later
                self.outer.pairwise.received.prepare(rest)
            # Behind the first on a stream of its own: launched by the computation, it would wait for the computation.
            between = self._between_groups.launch_after(reduced, partial(self._reduce_between_groups, rest, total))
            own = self.ranges.own_of(rest)
            return after(between, partial(total.set_mean, own, self.factor(dtype)))
        if self._adds(self.inner, dtype):
            reduced = self._sums.launch_after(reduced, self._sums.device_work)
        return after(reduced, partial(total.add, rest, 1.0, is_last=False))

    def _reduce_between_groups(self, rest: Tensor, total: GradientSum) -> Work:
        """Reduce the group's message, with the sum of its earlier micro-batches, in the type of messages."""
        if total.has_sum:
            with total.on_accelerator(self._between_groups.device_work) as earlier:
                rest.add_(earlier)  # in the type of the sum, and then rounded to that of messages
        in_fp32 = self._adds(self.outer, rest.dtype)
        if self.num_parts == 1:
            return all_reduce(self.outer, rest, self._sums, in_fp32=in_fp32)
        reduced = self.outer.reduce_scatter(rest, out=self.ranges.own_of(rest), in_fp32=self.in_fp32)
        # On a stream of its own: behind it on this one, the next bucket's reduction in the group would wait.
        return self._sums.launch_after(reduced, self._sums.device_work) if in_fp32 else reduced
