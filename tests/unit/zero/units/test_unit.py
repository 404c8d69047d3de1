"""The modules that are units, the parameters that belong to them, and the order in which they run."""

import pytest
import torch
from torch import nn

from tests.models import build
from zero.units.autograd import mark_end_of_backward, replace_tensors, tensors_in
from zero.units.execution_order import ExecutionOrder
from zero.units.unit import assign_parameters, find_units, group_alike, innermost_unit


def test_units_are_the_elements_of_the_outermost_module_lists():
    model = nn.ModuleDict(
        {
            "encoder": nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), nn.Linear(1, 1)]),
            "head": nn.Linear(1, 1),
            "encoder2": nn.ModuleList([nn.Linear(1, 1)]),
        }
    )
    assert find_units(model) == ["", "encoder.0.0", "encoder.1", "encoder2.0"]  # lists themselves are never called


def test_every_parameter_belongs_to_one_unit_and_tied_ones_to_the_root():
    model = build("toy")
    own = assign_parameters(model, find_units(model))
    assert sorted(name for params in own.values() for name in params) == sorted(dict(model.named_parameters()))
    assert set(own[""]) == {"tokens.weight", "large.weight", "large.bias", "bias", "blocks.0.down.weight"}
    assert all(name.startswith("blocks.1.") for name in own["blocks.1"])


@pytest.mark.parametrize(
    ("names", "unit"),
    [
        (["blocks.1.up.weight"], "blocks.1"),
        (["blocks.10.up.weight"], "blocks.10"),
        (["head.weight"], ""),
        (["blocks.1.up.weight", "head.weight"], ""),
        (["blocks.1.up.weight", "blocks.1.down.weight"], "blocks.1"),
        (["blocks.1.up.weight", "blocks.10.up.weight"], ""),
    ],
)
def test_a_tied_parameter_belongs_to_the_unit_around_all_its_names(names, unit):
    assert innermost_unit(names, ["", "blocks.1", "blocks.10"]) == unit


def test_parameters_are_grouped_by_dtype_and_requires_grad():
    model = nn.ParameterDict({"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1).half()})
    model["b"].requires_grad_(False)
    model["d"] = nn.Parameter(torch.zeros(2))
    assert [list(group) for group in group_alike(dict(model.items()))] == [["a", "d"], ["b"], ["c"]]


def test_an_execution_order_predicts_what_ran_last_time():
    order = ExecutionOrder[str]()
    assert [list(order.record(item)) for item in "abc"] == [[], [], []]
    order.restart()
    assert [list(order.record(item)) for item in "abc"] == [["b", "c"], ["c"], []]
    order.restart()
    assert not order.predicts("c")
    assert [list(order.record(item)) for item in "acb"] == [["b", "c"], [], []]  # a deviation: nothing is predicted
    order.restart()
    assert [list(order.record(item)) for item in "acb"] == [["c", "b"], ["b"], []]


def test_tensors_are_found_in_and_replaced_in_plain_containers_only():
    x, y, z = torch.zeros(3).unbind()
    cache = [y]
    tree = ({"x": x}, cache, 5)
    assert [id(tensor) for tensor in tensors_in((tree, z))] == [id(x), id(y), id(z)]
    replaced = replace_tensors(tree, {id(x): z, id(y): z})
    assert replaced[0]["x"] is z
    assert replaced[1] is cache
    assert cache[0] is y


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_the_end_of_backward_is_noticed_after_all_gradients(num_inputs):
    order = []
    inputs = tuple(torch.ones(2, requires_grad=True) for _ in range(num_inputs))
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _grad: order.append("weight"))
    marked = mark_end_of_backward(inputs, lambda: order.append("end"))
    (marked[0] * weight).exp().sum().backward()  # the second input, if any, is not used
    assert order == ["weight", "end"]
    assert torch.equal(inputs[0].grad, weight.grad)
    assert mark_end_of_backward(torch.ones(2), lambda: order.append("never")).grad_fn is None
