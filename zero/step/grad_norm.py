"""Norms of gradients that are sharded over many ranks: the global norm, and the norm of each layer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import reduce
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.autograd_internals import foreach_norm
from parallel.memory_kinds import TensorKind, allocating
from parallel.mesh import Axis
from zero.buckets.bucket import Bucket
from zero.buckets.weight_codes import Stretch
from zero.memory.placement import Placement
from zero.partition.layout import NORM_BLOCK
from zero.step.assembled_updates import Axes

# Elements whose squares a CPU sums at a time. It adds them in fp32 one after the other: without chunks, the norm of 17M
# elements is wrong by 2e-4. A GPU adds them as a tree.
CHUNK_NUMEL = 2**18
NUM_NORMS = 16  # of chunks that are computed by one kernel on a GPU
BLOCKS_CHUNK = 2**20  # elements whose squares, in fp64, exist at a time
SUM_BITS = 62  # of the sum of all blocks
SMALLEST_EXPONENT = -900  # so that the factor to integers is finite


class GradNorm:
    """The norms of the gradients of `params`, divided by the loss scale. All ranks must make the same calls.

    Along the shard axis, each element has one owner. Along the tensor axis, which cuts the model, the parameters that
    are not in `split` are replicated, and only the first tensor rank counts them.

    `owned` lists, for each bucket, the parts of parameters in this rank's shard.
    `axes` are the shard axis, the replica axis and the tensor axis. `in_blocks`: with bits that do not depend on who
    owns an element.
    """

    def __init__(
        self,
        owned: Mapping[Bucket, Sequence[Stretch]],
        params: Set[nn.Parameter],
        axes: Axes,
        split: Set[nn.Parameter],
        loss_scale: Tensor,
        *,
        in_blocks: bool = False,
    ):
        shard, replica, tensor = axes
        self._axes, self._loss_scale = (shard, tensor), loss_scale
        # In the order of ranks; an axis of one rank has nothing to add.
        self._adds_in_order = shard.size > 1 and replica.size > 1, tensor.size > 1
        num_blocks = tensor.size * sum(2 + param.numel() // NORM_BLOCK for param in params)
        self._num_blocks = num_blocks if in_blocks else None
        counted = params if tensor.rank == 0 else params & split
        self._counted = {bucket: [part for part in parts if part.param in counted] for bucket, parts in owned.items()}
        self._dtype = reduce(torch.promote_types, {bucket.master.dtype for bucket in owned}, torch.float32)
        self._counts_whole = {bucket for bucket, parts in owned.items() if len(parts) == len(self._counted[bucket])}

    @property
    def temporary_bytes(self) -> int:
        """The bytes of a sum and of the norms of some chunks, each by itself, in a stack and squared; all in fp32.

        The sums that are gathered, 4 bytes each, come after them. In blocks: the squares of a chunk in fp64 with their
        halves; beside them stand 8 bytes for each block.
        """
        if self._num_blocks is not None:
            return 8 * 3 * BLOCKS_CHUNK
        both = zip(self._axes, self._adds_in_order, strict=True)
        gathered = [axis.size + 1 for axis, adds_in_order in both if adds_in_order]
        return 4 * (1 + max([3 * NUM_NORMS, *gathered]))

    def total(self) -> Tensor:
        """Return the global norm, 0-dim, from the norms of a few chunks at a time (C_B).

        Chunks are added in the order of the layout, wherever their buckets are placed: a run that was resumed may place
        them differently, and must get the same bits.
        """
        if self._num_blocks is not None:
            return self._over_blocks(((0, chunk) for _, chunk in self._chunks()), 1)[0]
        squares = self._loss_scale.new_zeros((), dtype=self._dtype)
        chunks = self._chunks()
        while some := list(islice(chunks, NUM_NORMS)):
            squares.add_(_sum_of_squares(some, self._dtype).to(squares.device))
        return self._over_all_ranks(squares)

    def _chunks(self) -> Iterator[tuple[Placement, Tensor]]:
        """Iterate over the counted gradients of this rank in parts, each with its placement."""
        for bucket, parts in self._counted.items():
            grads = [bucket.grads.owned]  # the whole shard: its padding is zero
            if bucket not in self._counts_whole:
                grads = [bucket.owned_part(bucket.grads.owned, part.elements) for part in parts]
            for grad in grads:
                chunks = grad.split(CHUNK_NUMEL) if grad.device.type == "cpu" else (grad,)
                yield from ((bucket.optimizer_placement, chunk) for chunk in chunks)

    def by_layer(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the norm of each layer of `module`, 0-dim, by name. The norms of all layers share one message."""
        layers = {param: layer_of(name) for name, param in module.named_parameters()}
        numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers.values()))}
        chunks = (
            (numbers[layers[part.param]], chunk)
            for bucket, parts in self._counted.items()
            for part in parts
            for chunk in bucket.owned_part(bucket.grads.owned, part.elements).split(CHUNK_NUMEL)
        )
        if self._num_blocks is not None:
            return dict(zip(numbers, self._over_blocks(chunks, len(numbers)), strict=True))
        squares = self._loss_scale.new_zeros(len(numbers), dtype=self._dtype)
        for number, chunk in chunks:
            norm = torch.linalg.vector_norm(chunk, dtype=squares.dtype)
            squares[number] += norm.square().to(squares.device)
        return dict(zip(numbers, self._over_all_ranks(squares), strict=True))

    def _over_blocks(self, chunks: Iterable[tuple[int, Tensor]], num_sums: int) -> Tensor:
        """Return the norms over all ranks, each of the chunks with its number."""
        assert self._num_blocks is not None
        totals = self._loss_scale.new_zeros(num_sums, dtype=torch.int64)
        return (sums_of_squares(chunks, totals, self._axes, self._num_blocks).sqrt() / self._loss_scale).to(self._dtype)

    def _over_all_ranks(self, squares: Tensor) -> Tensor:
        """Return the norms, given the sums of squares of this rank, with the same bits on all ranks.

        An all-reduce gives them to the ranks of one group. Several groups that sum the same numbers may add in other
        orders: they would clip by coefficients that differ in the last bit, and nothing makes their master weights
        equal again. So they gather the numbers, which is as quick along axes of few ranks.
        """
        for axis, adds_in_order in zip(self._axes, self._adds_in_order, strict=True):
            if adds_in_order:
                squares = axis.gather_by_rank(squares).sum(dim=0)
            else:
                axis.all_reduce(squares, out=squares).wait()
        return squares.sqrt() / self._loss_scale


def _sum_of_squares(chunks: Sequence[tuple[Placement, Tensor]], dtype: torch.dtype) -> Tensor:
    """Return the sum of the squares of chunks, which may be in both memories, on the device of one of them."""
    norms: dict[int, Tensor] = {}
    for placement in Placement:
        numbers = [number for number, (own, _) in enumerate(chunks) if own is placement]
        with allocating(TensorKind.OTHER, on_host=placement is Placement.HOST):
            found = foreach_norm([chunks[number][1] for number in numbers], 2, dtype) if numbers else ()
        norms.update(zip(numbers, found, strict=True))
    first = norms[0]
    return torch.stack([norms[number].to(first.device) for number in range(len(chunks))]).square().sum()


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


def layer_of(name: str) -> str:
    """Return the layer of a parameter.

    This is its block, such as "blocks.3" for "blocks.3.mlp.up.weight"; outside the blocks, the first part of its name.
    """
    parts = name.split(".")
    first_number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: first_number + 1])
