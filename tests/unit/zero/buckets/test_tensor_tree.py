"""The tensors that a module takes and returns are found in whatever holds them, or their holder is reported."""

from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

from parallel.tensor_tree import MAX_OBJECTS, find_tensors

Pair = namedtuple("Pair", "x y")


class Plain:
    def __init__(self, x: Tensor):
        self.x, self.own = x, self  # a cycle


class Slotted:
    __slots__ = ("missing", "x")

    def __init__(self, x: Tensor):
        self.x = x


X, Y = torch.zeros(2), torch.ones(2)


def test_tensors_are_found_in_containers_and_objects_among_values_that_hold_none():
    others = [None, 3, "x", 2.5, torch.float32, torch.Size([2]), nn.Linear(1, 1), int]
    tensors, is_complete = find_tensors([Plain([X]), {"a": Slotted(Y), "b": (Y, X)}, *others])
    assert [id(tensor) for tensor in tensors] == [id(X), id(Y)]
    assert is_complete


@pytest.mark.parametrize(
    "hidden",
    [lambda: X, iter([X]), (x for x in [X]), Plain(lambda: X), list(map(Pair, [X] * MAX_OBJECTS, [1] * MAX_OBJECTS))],
)
def test_what_may_hide_tensors_is_reported(hidden):
    tensors, is_complete = find_tensors((Y, hidden))
    assert id(Y) in map(id, tensors)
    assert not is_complete
