"""Gradient norms by layer, of gradients that are sharded over many ranks: one message for all layers."""

import torch
from torch import Tensor

from parallel.mesh import Axis
from zero.engine import ZeroDataParallel
from zero.optimizer import NORM_CHUNK_NUMEL, ZeroOptimizer


def layer_norms(model: ZeroDataParallel, optimizer: ZeroOptimizer, tensor: Axis) -> dict[str, Tensor]:
    """Return {layer: norm before clipping, without the loss scale, 0-dim}.

    Call it in the `gradient_hook` of the optimizer's step: it reads owned gradients that are reduced and not clipped.
    """
    layers = {param: layer_of(name) for name, param in model.module.named_parameters()}
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers.values()))}
    squares = optimizer.loss_scale.scale.new_zeros(len(numbers))
    for bucket in optimizer.buckets:
        for param, gradient in optimizer.counted_gradients(bucket):
            for chunk in gradient.split(NORM_CHUNK_NUMEL):
                norm = torch.linalg.vector_norm(chunk, dtype=squares.dtype)
                squares[numbers[layers[param]]] += norm.square().to(squares.device)
    for axis in (model.shard_axis, tensor):
        axis.all_reduce(squares, out=squares).wait()
    return dict(zip(numbers, squares.sqrt() / optimizer.loss_scale.scale, strict=True))


def layer_of(name: str) -> str:
    """Return a parameter's block, such as "blocks.3" for "blocks.3.mlp.up.weight", or its module outside the blocks."""
    parts = name.split(".")
    first_number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: first_number + 1])
