"""Observers see the same operations on fake tensors as on real ones."""

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from parallel.instruments.fake_tensors import QuickFakeTensorMode
from parallel.instruments.operation_observer import active_observers, observe_operations


class Names:
    def __init__(self) -> None:
        self.names: list[str] = []

    def on_operation(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.names.append(str(function))


def compute() -> None:
    x = torch.ones(4, 6, requires_grad=True)
    y = F.layer_norm(F.gelu(x) @ x.t(), (4,))
    torch.nn.functional.cross_entropy(y, torch.zeros(4, dtype=torch.int64)).backward()


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


def test_results_are_repeated_for_an_argument_that_is_not_a_number_too():
    with (mode := QuickFakeTensorMode()):
        like = torch.zeros(3)
        for _ in range(5):
            like.new_full((), float("nan"))
    assert sum(str(key[0]) == "aten.new_full.default" for key in mode._results) == 1
