"""Norms of gradients that are sharded over many ranks: the global norm, and the norm of each layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import reduce
from itertools import islice

import torch
from torch import Tensor, nn

from parallel.autograd_internals import foreach_norm
from parallel.memory_kinds import TensorKind
from parallel.mesh import Axis
from zero.core.buckets.bucket import Bucket
from zero.core.partition.layout import Slice
from zero.core.protocols.home import Home

# Elements whose squares a CPU sums at a time. It adds them in fp32 one after the other: without chunks, the norm of 17M
# elements is wrong by 2e-4. A GPU adds them as a tree.
CHUNK_NUMEL = 2**18
NUM_NORMS = 16  # of chunks that are computed by one kernel on a GPU

NumberedChunks = Callable[[Axis], Iterator[tuple[int, Tensor]]]
"""The gradients of this rank that are counted along an axis, in chunks, each with the number of its sum."""


class GradNorm:
    """The norms of the gradients of `params`, divided by the loss scale. All ranks must make the same calls.

    Along the axis that a transport counts, each element has one owner. Along the tensor axis, which cuts the model, the
    parameters that are not in `split` are replicated, and only the first tensor rank counts them.

    `owned` lists, for each bucket, the parts of parameters that this rank owns. Squares are added along the axis that
    the bucket's transport counts, and along `tensor`.
    """

    def __init__(
        self,
        owned: Mapping[Bucket, Sequence[Slice]],
        params: Set[nn.Parameter],
        tensor: Axis,
        split: Set[nn.Parameter],
        loss_scale: Tensor,
    ):
        self._params, self._tensor, self._loss_scale = params, tensor, loss_scale
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

        The sums that are gathered, 4 bytes each, come after them.
        """
        gathered = [axis.size + 1 for axis, adds_in_order in self._adds_in_order.items() if adds_in_order]
        return 4 * (1 + max([3 * NUM_NORMS, *gathered]))

    def total(self) -> Tensor:
        """Return the global norm, 0-dim, from the norms of a few chunks at a time (C_B).

        Chunks are added in the order of the layout, wherever their buckets are placed: a run that was resumed may place
        them differently, and must get the same bits.
        """
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

        return dict(zip(numbers, self._of_numbered(chunks_along, len(numbers)), strict=True))

    def _of_numbered(self, chunks_along: NumberedChunks, num_sums: int) -> Tensor:
        """Return several norms, each of the chunks with its number."""
        found = []
        for axis in self._counted:
            squares = self._loss_scale.new_zeros(num_sums, dtype=self._dtype)
            for number, chunk in chunks_along(axis):
                norm = torch.linalg.vector_norm(chunk, dtype=squares.dtype)
                squares[number] += norm.square().to(squares.device)
            found.append(self._along(axis, squares))
        return self._norms(found)

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


def layer_of(name: str) -> str:
    """Return the layer of a parameter.

    This is its block, such as "blocks.3" for "blocks.3.mlp.up.weight"; outside the blocks, the first part of its name.
    """
    parts = name.split(".")
    first_number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: first_number + 1])
