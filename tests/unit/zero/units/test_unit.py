"""The modules that are units, the parameters that belong to them, and the order in which they run."""

import pytest
import torch
from torch import nn

from tests.models import build
from zero.order.agreement import module_around
from zero.order.orders import ExecutionOrder
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


@pytest.mark.parametrize(
    ("unit", "around"),
    [("1.experts.0", "1"), ("blocks.2.moe.experts.10", "blocks.2.moe"), ("net.groups.0.1", "net"), ("experts.0", "")],
)
def test_the_module_around_a_branch_is_the_one_that_has_the_list(unit, around):
    assert module_around(unit) == around


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
