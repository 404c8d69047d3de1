"""Sums of squares that are the same bits however the elements are divided over ranks.

gradients        | 256 elements | 256 elements | ...     counted from the parameter's beginning: no shard cuts a block
sums of blocks   |      a       |      b       | ...     in fp64, halves of a block added to each other
fixed point      |   integer    |   integer    | ...     of 64 bits, below the largest block of all ranks
sum              integers, whose order does not matter
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.mesh import Axis
from zero.partition.layout import NORM_BLOCK

CHUNK_NUMEL = 2**20  # elements whose squares, in fp64, exist at a time
SUM_BITS = 62  # of the sum of all blocks
SMALLEST_EXPONENT = -900  # so that the factor to integers is finite


def sums_of_squares(
    parts: Iterable[tuple[int, Tensor]], totals: Tensor, axes: Sequence[Axis], num_blocks: int
) -> Tensor:
    """Return sums over all ranks of the squares of flat gradients, in fp64, each part added to the sum with its number.

    `totals` are integer zeros, one for each sum, and `num_blocks` is the number of blocks of all ranks, or more.
    """
    found = [(number, _squares_of_blocks(grad).to(totals.device)) for number, grad in parts]
    own = [blocks.max() for _, blocks in found] or [totals.new_zeros((), dtype=torch.float64)]
    largest = torch.stack(own).max()
    for axis in axes:
        of_ranks = largest.new_empty(axis.size)
        axis.all_gather(largest.view(1), out=of_ranks).wait()
        largest = of_ranks.max()
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
    for chunk in grad.split(CHUNK_NUMEL):
        squares = F.pad(chunk.double().square(), (0, -len(chunk) % NORM_BLOCK)).view(-1, NORM_BLOCK)
        while squares.shape[1] > 1:
            left, right = squares.chunk(2, dim=1)
            squares = left + right
        sums.append(squares.view(-1))
    return torch.cat(sums)
