"""Finding the end of a module's backward, by a node in the autograd graph."""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor


class _EndOfBackward(torch.autograd.Function):
    """The identity, whose backward runs when the gradients of the module's inputs are known.

    Among the nodes that are ready, autograd runs the newest first: the other ready nodes of the module were made later,
    and have run by then.
    """

    @staticmethod
    def forward(ctx: Any, on_end: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.on_end = on_end
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.on_end()
        return None, *grads


def mark_end_of_backward(inputs: Any, on_end: Callable[[], None]) -> Any:
    """Return the same inputs; `on_end` is called when their gradients are known.

    It is never called if none of the inputs is differentiable.
    """
    differentiable = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
    if not differentiable:
        return inputs
    marked = _EndOfBackward.apply(on_end, *differentiable.values())
    return replace_tensors(inputs, dict(zip(differentiable, marked, strict=True)))


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested dictionaries, tuples, lists and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from tensors_in(branch)
    elif is_dataclass(tree):
        yield from tensors_in(vars(tree))


def replace_tensors(tree: Any, replacements: dict[int, Tensor]) -> Any:
    """Return the tree with the tensors replaced whose `id` is a key of `replacements`.

    Only plain dictionaries and tuples are rebuilt: a cache or a list that the module writes to must stay the caller's.
    """
    if isinstance(tree, Tensor):
        return replacements.get(id(tree), tree)
    if type(tree) is dict:
        return {key: replace_tensors(branch, replacements) for key, branch in tree.items()}
    if type(tree) is tuple:
        return tuple(replace_tensors(branch, replacements) for branch in tree)
    return tree
