"""Watchers see of fake tensors what they see of real ones."""

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from parallel.instruments.fake_tensors import QuickFakeTensorMode
from parallel.instruments.watching import active_watchers, watching


class Names:
    def __init__(self) -> None:
        self.names: list[str] = []

    def saw(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.names.append(str(function))


def compute() -> None:
    x = torch.ones(4, 6, requires_grad=True)
    y = F.layer_norm(F.gelu(x) @ x.t(), (4,))
    torch.nn.functional.cross_entropy(y, torch.zeros(4, dtype=torch.int64)).backward()


def test_fake_operations_are_seen_as_real_ones_are():
    seen = []
    for mode in (nullcontext(), QuickFakeTensorMode()):
        with mode, watching(names := Names()):
            compute()
        seen.append(names.names)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 15


def test_who_watches_inside_another_watches_until_it_leaves():
    with watching(outer := Names()):
        torch.zeros(1)
        with watching(inner := Names()):
            assert active_watchers() == [outer, inner]
            torch.ones(1)
        torch.zeros(1)
    assert len(outer.names) > len(inner.names) > 0
    assert active_watchers() == []


def test_what_was_once_found_of_an_operation_is_remembered_for_not_a_number_too():
    with (mode := QuickFakeTensorMode()):
        like = torch.zeros(3)
        for _ in range(5):
            like.new_full((), float("nan"))
    assert sum(str(key[0]) == "aten.new_full.default" for key in mode._results) == 1
