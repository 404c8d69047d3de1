"""Sums of gradients whose bits no number of ranks changes: the gradients of all micro-batches are added in one order.

The term of micro-batch j on rank r of N, in the type of messages, has number j N + r in its step.

in each micro-batch              message -> exchange -> term after term added to the sum, in fp32
and in the last one of a step    sums of groups -> exchange -> added along a tree -> times 1 / number of terms, the only
                                 factor -> own

A rank that keeps full gradients has consecutive terms, which are added in these: zero/transports/block_sums.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind
from parallel.mesh import Axis, Work
from zero.core.memory.allocators import device_allocator
from zero.core.partition.layout import Ranges, Slice
from zero.core.protocols.gradient_sum import GradientSum
from zero.transports.block_sums import Blocks, BlockSums, MicroBatchOrder
from zero.transports.two_level import TwoLevel


class FixedOrder(TwoLevel):
    """One or two levels, or an all-reduce (an inner axis of one rank), whose sums have a fixed order.

    The gradient is the mean over all micro-batches of a step: losses are not divided by their number. `num_blocks` are
    the blocks of micro-batches that are added along a tree, and `num_ranks_of_each` the neighboring ranks that compute
    a part of each micro-batch.
    """

    is_rank_invariant = True
    _order: MicroBatchOrder  # of the engine
    _sums_of_blocks: BlockSums  # of the bucket

    def __init__(
        self,
        data: Axis,
        inner: Axis,
        outer: Axis,
        *,
        num_blocks: int = 1,
        num_ranks_of_each: int = 1,
        over_all: bool = False,
    ):
        super().__init__(data, inner, outer, over_all=over_all)
        self.stages = (0, 1, 2, 3) if self.owners.size == 1 else (1, 2, 3)
        self._blocks = Blocks(inner.size, outer.size, num_blocks, num_ranks_of_each)

    def open(self, device: torch.device, *, keeps_full: bool) -> Self:
        """Return a copy for one engine. Raises ConfigError if ranks cannot divide the blocks that they add."""
        opened = super().open(device, keeps_full=keeps_full)
        opened._blocks = replace(self._blocks, keeps_full=keeps_full)
        opened._blocks.check()
        opened._order = MicroBatchOrder(opened._blocks, self.outer.rank * self.inner.size + self.inner.rank)
        return opened

    def bind(self, ranges: Ranges, slices: Sequence[Slice] = ()) -> Self:
        bound = super().bind(ranges, slices)
        bound._sums_of_blocks = BlockSums()
        return bound

    def scale(self, dtype: torch.dtype) -> float:
        return 1.0

    def begin_backward(self, number: int, num_micro_batches: int | None) -> bool:
        self._order.number, self._order.num_micro_batches = number, num_micro_batches
        begins = self._order.begins_block()  # in any case: it raises before anything is launched
        return begins and self._blocks.keeps_full

    def keep(self, full: Tensor) -> None:
        copy = device_allocator(full.device, TensorKind.GRADIENTS)(full.numel(), full.dtype)
        self._sums_of_blocks.push(copy.copy_(full))

    def holds_memory(self, dtype: torch.dtype) -> bool:
        return True

    def reduce(self, message: Tensor, total: GradientSum, *, is_last: bool) -> Work:
        if self._blocks.keeps_full:
            self._sums_of_blocks.add_to(message)
        return self.inner.exchange(message, partial(self._add, total, is_last))

    def reset(self) -> None:
        self._sums_of_blocks.clear()

    def check_several_gradients(self) -> None:
        raise ValueError("ZeroConfig.sum_over_ranks=leaves: a parameter gets one gradient; set use_reentrant=False")

    def check_missing_backward(self) -> None:
        raise ValueError(
            "the last micro-batch of a step must reach a parameter, outside of `model.accumulate()`, with "
            "ZeroConfig.sum_over_ranks=leaves; choose sum_over_ranks=message"
        )

    def _add(self, total: GradientSum, is_last: bool, terms: Tensor) -> None:
        """Add what the ranks of the group have sent, (ranks, n): terms, or sums of blocks of them."""
        has_sum = total.has_sum
        with total.summed_here(is_last=is_last) as rest:
            if self._blocks.keeps_full:
                rest.copy_(self._order.total(terms))
            else:
                self._add_in_order(terms, rest, has_sum)
            if is_last:
                self._add_groups(self._sums_of_blocks.add_to(rest))
                rest.mul_(self._order.factor)

    def _add_in_order(self, terms: Tensor, rest: Tensor, has_sum: bool) -> None:
        """Add terms, (ranks, n), one after the other, to the sum of their block; at the end blocks to each other."""
        for rank, term in enumerate(terms.unbind()):
            if self._order.begins_block(rank):
                self.keep(rest)
                has_sum = False
            # The first one is written: an added zero would turn -0.0 to 0.0.
            rest.add_(term) if has_sum else rest.copy_(term)
            has_sum = True

    def _add_groups(self, rest: Tensor) -> None:
        """Add the sums of groups along the tree: each rank a part of `rest`, which it owns or sends to replicas."""
        part = rest.chunk(self.outer.size)[self.outer.rank]
        self.outer.exchange(rest, lambda sums: part.copy_(self._order.total(sums))).wait()
        if self.num_parts == 1:
            self.outer.all_gather(part, out=rest).wait()
