"""What the engine needs of autograd: which backward is running, and when a module's backward has ended."""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

NO_BACKWARD = -1


def current_backward() -> int:
    """Autograd's number of the running backward: state that carries it is void once that backward ends or raises."""
    return torch._C._current_graph_task_id()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Only inside a backward; once for every call."""
    Variable._execution_engine.queue_callback(callback)


class _EndOfBackward(torch.autograd.Function):
    """The identity; its backward runs after that of every node made later: autograd takes the newest first."""

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
    """The same inputs; `on_end` is called when their gradients are known. Not called where none is differentiable."""
    differentiable = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
    if not differentiable:
        return inputs
    marked = _EndOfBackward.apply(on_end, *differentiable.values())
    return replace_tensors(inputs, dict(zip(differentiable, marked, strict=True)))


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from tensors_in(branch)
    elif is_dataclass(tree):
        yield from tensors_in(vars(tree))


def replace_tensors(tree: Any, marked: dict[int, Tensor]) -> Any:
    """The same tree with other tensors. Only plain containers are rebuilt: a cache or a list that the module writes
    to must stay the caller's own."""
    if isinstance(tree, Tensor):
        return marked.get(id(tree), tree)
    if type(tree) is dict:
        return {key: replace_tensors(branch, marked) for key, branch in tree.items()}
    if type(tree) is tuple:
        return tuple(replace_tensors(branch, marked) for branch in tree)
    return tree
