"""The tensors that a module takes and returns are found in whatever holds them, or their holder is reported."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.tensor_tree import MAX_OBJECTS, cast_floating_point, find_tensors

Pair = namedtuple("Pair", "x y")


class Plain:
    def __init__(self, x: Tensor):
        self.x, self.own = x, self  # a cycle


class Slotted:
    __slots__ = ("missing", "x")

    def __init__(self, x: Tensor):
        self.x = x


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    rest: Any = None


class Named(OrderedDict):
    pass


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


def test_floating_point_tensors_are_cast_in_containers_and_dataclasses():
    numbers = torch.tensor([1, 2])
    tree = [{"a": X}, Pair(Y, 1), Frozen([X], numbers), Named(a=Frozen(X)), numbers]
    cast: Any = cast_floating_point(tree, torch.bfloat16)
    found = [tensor.dtype for tensor in find_tensors(cast)[0]]
    assert sorted(map(str, found)) == ["torch.bfloat16"] * 4 + ["torch.int64"]
    assert [type(item) for item in cast] == [type(item) for item in tree]
    assert tree[2].x[0] is X
    kept = [Frozen([1, numbers]), Named(a=Frozen(numbers))]
    assert all(new is old for new, old in zip(cast_floating_point(kept, torch.bfloat16), kept, strict=True))


def test_objects_that_refer_to_each_other_are_cast_once():
    @dataclass
    class Node:
        x: Tensor
        other: Any = None

    first, second = Node(X), Node(Y)
    first.other, second.other = second, first
    one, again = cast_floating_point([first, first], torch.bfloat16)
    assert one is again
    assert one.x.dtype is one.other.x.dtype is torch.bfloat16
