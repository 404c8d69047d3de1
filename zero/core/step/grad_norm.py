"""Norms of gradients that are sharded over many ranks: the global norm, and the norm of each layer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import reduce
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.autograd_internals import foreach_norm
from parallel.memory_kinds import TensorKind
from parallel.mesh import Axis
from zero.core.buckets.bucket import Bucket
from zero.core.partition.layout import NORM_BLOCK, Slice
from zero.core.protocols.home import Home

# Elements whose squares a CPU sums at a time. It adds them in fp32 one after the other: without chunks, the norm of 17M
# elements is wrong by 2e-4. A GPU adds them as a tree.
CHUNK_NUMEL = 2**18
NUM_NORMS = 16  # of chunks that are computed by one kernel on a GPU
BLOCKS_CHUNK = 2**20  # elements whose squares, in fp64, exist at a time
SUM_BITS = 62  # of the sum of all blocks
SMALLEST_EXPONENT = -900  # so that the factor to integers is finite


class GradNorm:
    """The norms of the gradients of `params`, divided by the loss scale. All ranks must make the same calls.

    Along the axis that a transport counts, each element has one owner. Along the tensor axis, which cuts the model, the
    parameters that are not in `split` are replicated, and only the first tensor rank counts them.

    `owned` lists, for each bucket, the parts of parameters that this rank owns. Squares are added along the axis that
    the bucket's transport counts, and along `tensor`. If transports are exact, the bits of a norm do not depend on who
    owns an element.
    """

    def __init__(
        self,
        owned: Mapping[Bucket, Sequence[Slice]],
        params: Set[nn.Parameter],
        tensor: Axis,
        split: Set[nn.Parameter],
        loss_scale: Tensor,
    ):
        self._tensor, self._loss_scale = tensor, loss_scale
        num_blocks = tensor.size * sum(2 + param.numel() // NORM_BLOCK for param in params)
        num_kinds = max(bucket.transport.counted.size // bucket.transport.owners.size for bucket in owned)
        self._num_blocks = (
            num_kinds * num_blocks if all(bucket.transport.is_rank_invariant for bucket in owned) else None
        )
        self._dtype = reduce(torch.promote_types, {bucket.master.dtype for bucket in owned}, torch.float32)
        counted = params if tensor.rank == 0 else params & split
        # Of each axis: whether squares are added in the order of ranks, which replicas need for the same bits.
        self._adds_in_order = {tensor: tensor.size > 1}  # an axis of one rank has nothing to add
        self._counted: dict[Axis, dict[Bucket, list[Slice]]] = {}
        for bucket, parts in owned.items():
            axis, replicas = bucket.transport.counted, bucket.transport.replicas
            self._adds_in_order[axis] = self._adds_in_order.get(axis, False) or axis.size > 1 < replicas.size
            self._counted.setdefault(axis, {})[bucket] = [part for part in parts if part.param in counted]
        self._counts_whole = {
            bucket
            for of_axis in self._counted.values()
            for bucket, parts in of_axis.items()
            if len(parts) == len(owned[bucket])
        }

    @property
    def temporary_bytes(self) -> int:
        """The bytes of a sum and of the norms of some chunks, each by itself, in a stack and squared; all in fp32.

        The sums that are gathered, 4 bytes each, come after them. In blocks: the squares of a chunk in fp64 with their
        halves; beside them stand 8 bytes for each block.
        """
        if self._num_blocks is not None:
            return 8 * 3 * BLOCKS_CHUNK
        gathered = [axis.size + 1 for axis, adds_in_order in self._adds_in_order.items() if adds_in_order]
        return 4 * (1 + max([3 * NUM_NORMS, *gathered]))

    def total(self) -> Tensor:
        """Return the global norm, 0-dim, from the norms of a few chunks at a time (C_B).

        Chunks are added in the order of the layout, wherever their buckets are placed: a run that was resumed may place
        them differently, and must get the same bits.
        """
        if self._num_blocks is not None:
            return self._over_blocks(((0, chunk) for axis in self._counted for _, chunk in self._chunks(axis)), 1)[0]
        found = []
        for axis in self._counted:
            squares, chunks = self._loss_scale.new_zeros((), dtype=self._dtype), self._chunks(axis)
            while some := list(islice(chunks, NUM_NORMS)):
                squares.add_(_sum_of_squares(some, self._dtype).to(squares.device))
            found.append(self._along(axis, squares))
        return self._norms(found)

    def _chunks(self, axis: Axis) -> Iterator[tuple[Home, Tensor]]:
        """Iterate over the gradients of this rank that are counted along an axis in parts, each with its home."""
        for bucket, parts in self._counted[axis].items():
            grads = [bucket.grads.own]  # all of it: its padding is zero
            if bucket not in self._counts_whole:
                grads = [bucket.owned_part(bucket.grads.own, part.elements) for part in parts]
            for grad in grads:
                chunks = grad.split(CHUNK_NUMEL) if grad.device.type == "cpu" else (grad,)
                yield from ((bucket.home, chunk) for chunk in chunks)

    def by_layer(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the norm of each layer of `module`, 0-dim, by name. The norms of all layers share one message."""
        layers = {param: layer_of(name) for name, param in module.named_parameters()}
        numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers.values()))}

        def chunks_along(axis: Axis) -> Iterator[tuple[int, Tensor]]:
            for bucket, parts in self._counted[axis].items():
                for part in parts:
                    grad = bucket.owned_part(bucket.grads.own, part.elements)
                    yield from ((numbers[layers[part.param]], chunk) for chunk in grad.split(CHUNK_NUMEL))

        if self._num_blocks is not None:
            all_chunks = (chunk for axis in self._counted for chunk in chunks_along(axis))
            return dict(zip(numbers, self._over_blocks(all_chunks, len(numbers)), strict=True))
        found = []
        for axis in self._counted:
            squares = self._loss_scale.new_zeros(len(numbers), dtype=self._dtype)
            for number, chunk in chunks_along(axis):
                norm = torch.linalg.vector_norm(chunk, dtype=squares.dtype)
                squares[number] += norm.square().to(squares.device)
            found.append(self._along(axis, squares))
        return dict(zip(numbers, self._norms(found), strict=True))

    def _over_blocks(self, chunks: Iterable[tuple[int, Tensor]], num_sums: int) -> Tensor:
        """Return the norms over all ranks, each of the chunks with its number."""
        assert self._num_blocks is not None
        totals, axes = self._loss_scale.new_zeros(num_sums, dtype=torch.int64), (*self._counted, self._tensor)
        return (sums_of_squares(chunks, totals, axes, self._num_blocks).sqrt() / self._loss_scale).to(self._dtype)

    def _norms(self, squares: Sequence[Tensor]) -> Tensor:
        """Return the norms, given the sums of squares along each axis."""
        return self._along(self._tensor, reduce(Tensor.add, squares)).sqrt() / self._loss_scale

    def _along(self, axis: Axis, squares: Tensor) -> Tensor:
        """Return the sums of the squares of all ranks of an axis, with the same bits on each.

        An all-reduce gives them to the ranks of one group. Several groups that sum the same numbers may add in other
        orders: they would clip by coefficients that differ in the last bit, and nothing makes their master weights
        equal again. So they gather the numbers, which is as quick along axes of few ranks.
        """
        if self._adds_in_order[axis]:
            return axis.gather_by_rank(squares).sum(dim=0)
        axis.all_reduce(squares, out=squares).wait()
        return squares


def _sum_of_squares(chunks: Sequence[tuple[Home, Tensor]], dtype: torch.dtype) -> Tensor:
    """Return the sum of the squares of chunks, which may have several homes, on the device of one of them."""
    norms: dict[int, Tensor] = {}
    for home in dict.fromkeys(own for own, _ in chunks):
        numbers = [number for number, (own, _) in enumerate(chunks) if own is home]
        with home.allocating(TensorKind.OTHER):
            found = foreach_norm([chunks[number][1] for number in numbers], 2, dtype)
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
