"""Norms of gradients whose bits do not depend on who owns an element."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.mesh import Axis
from zero.core.partition.layout import NORM_BLOCK
from zero.core.step.grad_norm import GradNorm, NumberedChunks

BLOCKS_CHUNK = 2**20  # elements whose squares, in fp64, exist at a time
SUM_BITS = 62  # of the sum of all blocks
SMALLEST_EXPONENT = -900  # so that the factor to integers is finite


class BlockNorm(GradNorm):
    """The norms of gradients that have the same bits on any number of ranks, as sums over blocks of elements."""

    @cached_property
    def _num_blocks(self) -> int:
        """The number of blocks of all ranks, or more."""
        transports = [bucket.transport for of_axis in self._counted.values() for bucket in of_axis]
        num_kinds = max(transport.counted.size // transport.owners.size for transport in transports)
        return num_kinds * self._tensor.size * sum(2 + param.numel() // NORM_BLOCK for param in self._params)

    @property
    def temporary_bytes(self) -> int:
        """The bytes of the squares of a chunk in fp64 with their halves; beside them stand 8 bytes for each block."""
        return 8 * 3 * BLOCKS_CHUNK

    def total(self) -> Tensor:
        """Return the global norm, 0-dim."""
        return self._of_numbered(lambda axis: ((0, chunk) for _, chunk in self._chunks(axis)), 1)[0]

    def _of_numbered(self, chunks_along: NumberedChunks, num_sums: int) -> Tensor:
        totals, axes = self._loss_scale.new_zeros(num_sums, dtype=torch.int64), (*self._counted, self._tensor)
        chunks = (chunk for axis in self._counted for chunk in chunks_along(axis))
        return (sums_of_squares(chunks, totals, axes, self._num_blocks).sqrt() / self._loss_scale).to(self._dtype)


def sums_of_squares(
    parts: Iterable[tuple[int, Tensor]], totals: Tensor, axes: Sequence[Axis], num_blocks: int
) -> Tensor:
    """Return sums over all ranks of the squares of flat gradients, in fp64, each part added to the sum with its number.

    The bits are the same however the elements are divided over ranks:

    gradients        | 256 elements | 256 elements | ...     from the beginning of a parameter: no shard cuts a block
    sums of blocks   |      a       |      b       | ...     in fp64, halves of a block added to each other
    fixed point      |   integer    |   integer    | ...     of 64 bits, below the largest block of all ranks
    sum              integers, whose order does not matter

    `totals` are integer zeros, one for each sum, and `num_blocks` is the number of blocks of all ranks, or more.
    """
    found = [(number, _squares_of_blocks(grad).to(totals.device)) for number, grad in parts]
    own = [blocks.max() for _, blocks in found] or [totals.new_zeros((), dtype=torch.float64)]
    largest = torch.stack(own).max()
    for axis in axes:
        largest = axis.gather_by_rank(largest).max()
    exponent = torch.frexp(largest).exponent.clamp(min=SMALLEST_EXPONENT).double()
    shift = SUM_BITS - num_blocks.bit_length()
    factor, inverse = torch.exp2(shift - exponent), torch.exp2(exponent - shift)
    for number, blocks in found:
        totals[number] += (blocks * factor).round_().long().sum()
    for axis in axes:
        axis.all_reduce(totals, out=totals).wait()
    # An element that is not finite leaves no integers.
    return torch.where(largest.isfinite(), totals * inverse, largest)


def _squares_of_blocks(grad: Tensor) -> Tensor:
    """Return the sum of squares of each block: by element-wise additions, since a kernel's order depends on shapes."""
    sums = []
    for chunk in grad.split(BLOCKS_CHUNK):
        squares = F.pad(chunk.double().square(), (0, -len(chunk) % NORM_BLOCK)).view(-1, NORM_BLOCK)
        while squares.shape[1] > 1:
            left, right = squares.chunk(2, dim=1)
            squares = left + right
        sums.append(squares.view(-1))
    return torch.cat(sums)
