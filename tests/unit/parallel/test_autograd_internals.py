"""Private parts of torch behave as this project needs: a test for each part of parallel/autograd_internals.py.

If one fails after an update of torch, the function that it tests is the place to adapt.
"""

import runpy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parallel import autograd_internals as internals


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_has_the_dtype_of_its_sum(dtype):
    values = torch.tensor([1.0] + [2.0**-10] * 2**12, dtype=torch.bfloat16)
    (norm,) = internals.foreach_norm([values], 2, dtype)
    assert norm.dtype is dtype
    assert norm.item() == torch.tensor(1 + 2.0**-8, dtype=dtype).sqrt().item()  # every partial sum is exact; 1 in bf16


def numbers_of_backward(x: Tensor) -> list[int]:
    """Return the numbers that two hooks of one backward read."""
    numbers: list[int] = []
    y, z = x.sin(), x.cos()
    for tensor in (y, z):
        tensor.register_hook(lambda _grad: numbers.append(internals.current_graph_task()))
    (y * z).sum().backward()
    return numbers


def test_a_backward_has_one_number_which_no_other_has():
    x = torch.ones(2, requires_grad=True)
    assert internals.current_graph_task() == internals.NO_GRAPH_TASK
    first, second = numbers_of_backward(x), numbers_of_backward(x)
    assert len(first) == len(second) == 2
    assert len({*first}) == len({*second}) == 1
    assert len({internals.NO_GRAPH_TASK, first[0], second[0]}) == 3
    assert internals.current_graph_task() == internals.NO_GRAPH_TASK


def test_the_end_of_backward_follows_every_gradient_and_is_reported_once():
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    events: list[Any] = []

    def end() -> None:
        events.append(("end", [param.grad is not None for param in params]))

    def accept(number: int) -> None:
        if not events:
            internals.call_at_end_of_backward(end)
        events.append(number)

    for number, param in enumerate(params):
        param.register_post_accumulate_grad_hook(lambda _param, number=number: accept(number))
    for _ in range(2):
        events.clear()
        (params[0] * params[1].exp() + params[2]).sum().backward()
        assert sorted(events[:-1]) == [0, 1, 2]
        assert events[-1] == ("end", [True] * 3)


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.fill_(1.0),
        lambda tensor: tensor.zero_(),
        lambda tensor: tensor[1, 2].fill_(1.0),
        lambda tensor: tensor.__setitem__((1, 2), 1.0),
        lambda tensor: tensor.mul_(2.0),
        lambda tensor: tensor.copy_(torch.ones(2, 3)),
    ],
    ids=["fill_", "zero_", "an element, filled", "an element, assigned", "mul_", "copy_"],
)
@pytest.mark.parametrize("is_expanded", [True, False])
def test_writes_raise_and_reads_work(write: Callable[[Tensor], Any], is_expanded: bool):
    scalar = torch.tensor(7.0)
    tensor = scalar.expand(2, 3) if is_expanded else torch.full((2, 3), 7.0)
    internals.forbid_writes(scalar if is_expanded else tensor)  # of all that share the storage
    with pytest.raises(RuntimeError):
        write(tensor)
    assert tensor.tolist() == [[7.0] * 3] * 2
    assert (tensor * 2 + tensor.clone()).eq(21.0).all()
    assert nn.Parameter(tensor).sum().item() == 42.0


class EntersAutograd(torch.autograd.Function):
    """A function whose backward runs a backward of its own, as a reentrant checkpoint does."""

    @staticmethod
    def forward(ctx, x, notes):
        ctx.notes = notes
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.notes["outer"] = internals.is_nested_backward()
        inner = torch.ones(2, requires_grad=True)
        inner.register_hook(lambda _grad: ctx.notes.update(inner=internals.is_nested_backward()))
        with torch.enable_grad():
            inner.exp().sum().backward()
        ctx.notes["outer again"] = internals.is_nested_backward()
        return grad, None


def test_a_backward_inside_another_one_is_noticed():
    notes = {}
    EntersAutograd.apply(torch.ones(2, requires_grad=True), notes).sum().backward()
    assert notes == {"outer": False, "inner": True, "outer again": False}


def test_however_a_program_is_started_its_backward_is_not_nested(tmp_path):
    """`python -m` calls a program from frames of its own, those of `runpy`."""
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "from parallel.autograd_internals import is_nested_backward\n"
        "notes, x = [], torch.ones(2, requires_grad=True)\n"
        "x.register_hook(lambda _grad: notes.append(is_nested_backward()))\n"
        "x.sum().backward()\n"
    )
    notes = []
    for run in (lambda program: program(), lambda program: ThreadPoolExecutor(1).submit(program).result()):
        notes += run(partial(runpy.run_path, str(tmp_path / "program.py")))["notes"]
    assert notes == [False, False]


def test_whether_a_backward_accumulates_a_gradient_is_known():
    weight, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    x = torch.ones(2, requires_grad=True)
    notes = []

    def note(_grad: Tensor) -> None:
        notes.append([internals.will_accumulate(param) for param in (weight, unused, frozen)])

    def loss() -> Tensor:
        y = weight * x * frozen
        y.register_hook(note)
        return y.sum()

    loss().backward()
    torch.autograd.grad(loss(), x)
    torch.autograd.grad(loss(), weight)
    loss().backward(inputs=[x])
    assert notes == [[True, False, False], *[[False] * 3] * 3]


def test_hooks_are_put_first_and_last():
    order = []
    module = nn.Identity()
    first = module.register_forward_pre_hook(lambda *_: order.append("first"))
    last = module.register_forward_hook(lambda *_: order.append("last"))
    module.register_forward_pre_hook(lambda *_: order.append("before"), prepend=True)
    module.register_forward_hook(lambda *_: order.append("after"))
    for _ in range(2):
        internals.run_first(module, first)
        internals.run_last(module, last)
    module(torch.ones(1))
    assert order == ["first", "before", "after", "last"]


def test_hooks_on_saved_tensors_are_noticed():
    assert not internals.has_saved_tensors_hooks()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert internals.has_saved_tensors_hooks()
    assert not internals.has_saved_tensors_hooks()


def test_a_write_inside_a_transform_is_hidden_from_it():
    memory = torch.zeros(2)

    def write() -> None:
        memory.fill_(3.0)

    def function(x: Tensor, write: Callable[[], None]) -> Tensor:
        write()
        return (memory * x).sum()

    with pytest.raises(RuntimeError, match="in-place operation"):
        torch.func.grad(function)(torch.ones(2), write)
    assert torch.func.grad(function)(torch.ones(2), internals.outside_of_transforms(write)).tolist() == [3.0, 3.0]


def test_a_named_hook_runs_and_is_removed():
    notes: list[str] = []
    module = nn.Linear(1, 1)
    first = module.register_forward_hook(lambda *_: notes.append("named"), always_call=True)
    module.register_forward_hook(lambda *_: notes.append("other"))
    internals.name_hook(first, "a name")
    module(torch.ones(1))
    with pytest.raises(RuntimeError):
        module(torch.ones(2))
    assert notes == ["other", "named", "named"]  # the last one is called if the module raises, too
    first.remove()
    module(torch.ones(1))
    assert notes[3:] == ["other"]
    assert not module._forward_hooks_always_called


def test_a_function_that_never_begins_a_graph_is_a_part_of_others():
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        return x.sin()

    internals.never_begin_graph(inner)
    compiled_inner, outer = torch.compile(inner, backend=count), torch.compile(lambda x: inner(x) + 1, backend=count)
    compiled_inner(torch.ones(1))
    assert not graphs
    outer(torch.ones(1))
    assert len(graphs) == 1
