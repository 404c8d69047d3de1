"""Norms of gradients that are sharded over many ranks: the global norm, and the norm of each layer."""

import math
from collections.abc import Mapping, Sequence, Set
from functools import reduce

import torch
from torch import Tensor, nn

from parallel.instruments.memory_tracker import TensorKind, allocating
from parallel.mesh import Axis
from zero.bucket import Bucket
from zero.offload.placement import Placement
from zero.torch_internals import foreach_norm

# A CPU adds fp32 squares one after the other: the norm of 17M elements in one piece is wrong by 2e-4.
CHUNK_NUMEL = 2**18


class GradNorm:
    """Norms of the owned gradients of all ranks, divided by the loss scale. Call its methods on all ranks alike.

    Each element has one owner along the shard axis. Along the tensor axis, which cuts the model, parameters that are
    not in `split` are replicated: the first tensor rank counts them.
    """

    def __init__(
        self,
        owned: Mapping[Bucket, Sequence[tuple[nn.Parameter, range]]],
        axes: tuple[Axis, Axis],
        split: Set[nn.Parameter],
        loss_scale: Tensor,
    ):
        """`owned`: for each bucket, the parameters in this rank's shard and their elements of the flat buffer.

        `axes`: the shard axis and the tensor axis.
        """
        self._axes, self._loss_scale = axes, loss_scale
        self._counts_replicated = axes[1].rank == 0
        self._counted = {
            bucket: [(param, part) for param, part in pieces if self._counts_replicated or param in split]
            for bucket, pieces in owned.items()
        }

    @property
    def temporary_bytes(self) -> int:
        """Memory of the norms of one bucket's chunks."""
        return 2 * 4 * max((math.ceil(bucket.master.numel() / CHUNK_NUMEL) for bucket in self._counted), default=0)

    def total(self) -> Tensor:
        """Return the global norm, 0-dim, one bucket at a time (C_B).

        Buckets are added in one order, wherever they are placed: a run that is resumed places them anew.
        """
        dtype = reduce(torch.promote_types, {bucket.master.dtype for bucket in self._counted}, torch.float32)
        squares = self._loss_scale.new_zeros((), dtype=dtype)
        for bucket, pieces in self._counted.items():
            grads = [bucket.grads.owned]  # all of it, padding included, which is zero
            if not self._counts_replicated:
                grads = [bucket.owned_part(bucket.grads.owned, part) for _, part in pieces]
            if chunks := [chunk for grad in grads for chunk in grad.split(CHUNK_NUMEL)]:
                with allocating(TensorKind.OTHER, on_host=bucket.optimizer_placement is Placement.HOST):
                    square = torch.stack(list(foreach_norm(chunks, 2, dtype))).square().sum()
                squares.add_(square.to(squares.device))
        return self._summed(squares)

    def by_layer(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the norm of each layer of `module`, 0-dim, by name; one message for all layers."""
        layers = {param: layer_of(name) for name, param in module.named_parameters()}
        numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers.values()))}
        squares = self._loss_scale.new_zeros(len(numbers))
        for bucket, pieces in self._counted.items():
            for param, part in pieces:
                for chunk in bucket.owned_part(bucket.grads.owned, part).split(CHUNK_NUMEL):
                    norm = torch.linalg.vector_norm(chunk, dtype=squares.dtype)
                    squares[numbers[layers[param]]] += norm.square().to(squares.device)
        return dict(zip(numbers, self._summed(squares), strict=True))

    def _summed(self, squares: Tensor) -> Tensor:
        for axis in self._axes:
            axis.all_reduce(squares, out=squares).wait()
        return squares.sqrt() / self._loss_scale


def layer_of(name: str) -> str:
    """Return a parameter's block, such as "blocks.3" for "blocks.3.mlp.up.weight", or its module outside the blocks."""
    parts = name.split(".")
    first_number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: first_number + 1])
