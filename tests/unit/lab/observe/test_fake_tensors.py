"""Fake tensors have the shapes and memory of real ones, and observers see the same operations on both."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lab.observe.fake_tensors import QuickFakeTensorMode, instances_in
from lab.observe.operation_observer import observe_operations
from parallel.torch_internals import OpOverload, active_observers, schema_of, storage_id


class Names:
    """An observer that remembers operations, with the number of tensors that each has returned."""

    def __init__(self) -> None:
        self.names: list[tuple[str, int]] = []

    def on_operation(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.names.append((str(function), len(list(instances_in((output,), Tensor)))))


def compute() -> None:
    x = torch.ones(4, 6, requires_grad=True)
    y = F.layer_norm(F.gelu(x) @ x.t(), (4,))
    torch.nn.functional.cross_entropy(y, torch.zeros(4, dtype=torch.int64)).backward()
    with torch.no_grad():
        x.add_(1)


def test_observers_see_fake_operations_as_they_see_real_ones():
    seen = []
    for mode in (nullcontext(), QuickFakeTensorMode()):
        with mode, observe_operations(names := Names()):
            compute()
        seen.append(names.names)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 15


def test_an_inner_observer_sees_operations_until_its_block_ends():
    with observe_operations(outer := Names()):
        torch.zeros(1)
        with observe_operations(inner := Names()):
            assert active_observers() == [outer, inner]
            torch.ones(1)
        torch.zeros(1)
    assert len(outer.names) > len(inner.names) > 0
    assert active_observers() == []


class SlowPath(QuickFakeTensorMode):
    """A mode that remembers which operations torch has carried out since the last call of `taken`."""

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []

    def dispatch(self, func: OpOverload, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(schema_of(func).name.removeprefix("aten::"))
        return super().dispatch(func, types, args, kwargs)

    def taken(self) -> list[str]:
        names, self._names = self._names, []
        return names


def norm_backward(x: Tensor) -> Any:
    mean = torch.zeros(4, 1)
    return torch.ops.aten.native_layer_norm_backward(x, x, [6], mean, mean, None, None, [True, False, False])


# {computation: the operations that torch carries out each time that it is repeated}
COMPUTATIONS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "in place": (lambda x: x.add_(1), []),
    "in place, of a list": (lambda x: (torch._foreach_add_([x], 1), x), []),
    "out": (lambda x: torch.add(x, 1, out=x), []),
    "out, resized": (lambda x: torch.add(x, 1, out=torch.empty(0)), ["add"]),
    "outs": (lambda x: torch.aminmax(x, out=(torch.zeros(()), torch.zeros(()))), ["aminmax"]),
    "resize": (lambda x: x.resize_(2), ["resize_"]),
    "another shape in place": (lambda x: x.unsqueeze_(0), ["unsqueeze_"]),
    "view": (lambda x: x[1:].t(), []),
    "views": (lambda x: x.unbind(), []),
    "view, not by its schema": (lambda x: torch.ops.aten._unsafe_view(x, [6, 4]), []),
    "copy, a view by its schema": (lambda x: x.t().reshape(4, 6), []),
    "elementwise": (lambda x: x + 1, []),
    "type of an argument": (lambda x: (x.int() + 1, x.int() + 1.0, x.int() + True), []),
    "strides of an argument": (lambda x: (x + 1, x.reshape(6, 4).t() + 1), []),
    "a type by its name": (lambda x: (torch.zeros(3), torch.zeros(3, dtype=torch.int64)), []),
    "an argument that is not a number": (lambda x: x.new_full((), float("nan")), []),
    "product": (lambda x: x @ x.t(), []),
    "two results": (lambda x: x.max(1), []),
    "a list of results": (lambda x: torch._foreach_add([x, x[1:]], 1), []),
    "an operation of another library": (lambda x: torch.ops.prims.sin(x), ["prims::sin"]),
    "no gradients of weights": (norm_backward, ["native_layer_norm_backward"]),
    "empty": (lambda x: torch.zeros(0, 5), []),
    "gaps in memory": (lambda x: torch.empty_strided((2, 3), (1, 5)), []),
    "a value": (lambda x: x * torch.tensor(2.0), ["lift_fresh", "mul"]),
    "a value in a list": (lambda x: torch.stack([x[0, 0], torch.tensor(2.0)]), ["lift_fresh", "stack"]),
}


def described(result: Any, x: Tensor) -> list[tuple[Any, ...]]:
    """Return the shape and memory of each result, and whether it is that of `x`."""
    return [
        (
            *(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset()),
            tensor.untyped_storage().nbytes(),
            storage_id(tensor.untyped_storage()) == storage_id(x.untyped_storage()),
        )
        for tensor in instances_in((result,), Tensor)
    ]


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_results_are_those_of_real_tensors_and_are_repeated_without_torch(name):
    compute, carried_out = COMPUTATIONS[name]
    x = torch.zeros(4, 6)
    expected = described(compute(x), x)
    assert expected
    with (mode := SlowPath()):
        for _ in range(3):
            x = torch.zeros(4, 6)
            mode.taken()
            assert described(compute(x), x) == expected
    assert mode.taken() == carried_out
