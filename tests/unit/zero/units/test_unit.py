"""The modules that are units, by default or by patterns, their parameters, and the order in which they run."""

import pytest
import torch
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from tests.models import build
from zero.core.protocols.orders import ExecutionOrder
from zero.core.units.unit import assign_parameters, find_units, group_alike, innermost_unit, named_units
from zero.data_parallel import ZeroDataParallel
from zero.extensions.agreement import module_around
from zero.extensions.late_gathers import hook_readers
from zero.settings.config import ZeroConfig


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


NUM_BLOCKS, WIDTH = 6, 16
NUMEL = WIDTH * (WIDTH + 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize(
    ("patterns", "units"),
    [
        (["*.first", "*.second"], ["", "0.first", "0.second", "1.first", "1.second"]),
        (["*.second", "*.first"], ["", "0.first", "0.second", "1.first", "1.second"]),
        (["*.first", "*"], ["", "0", "0.first", "1", "1.first"]),  # one inside another
    ],
)
def test_units_are_in_the_order_of_the_modules(patterns, units):
    assert named_units(nn.Sequential(Block(), Block()), patterns) == units


def test_a_module_in_two_units_is_refused_though_the_name_of_one_begins_as_the_other():
    model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(1, 1))})
    model["block2"] = nn.Sequential(model["block"][0])
    with pytest.raises(ConfigError, match="block and block2 share a module"):
        named_units(model, ["block", "block2"])


@pytest.mark.parametrize("patterns", [("*.first", "*.second"), ("*.second", "*.first")])
def test_gradients_of_few_units_are_staged_at_a_time(patterns):
    model = nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)])
    config = ZeroConfig(stage=3, bucket_numel=NUMEL, overlap=False, units=patterns)
    wrapped = ZeroDataParallel(model, Axis.trivial("data"), config)
    wrapped(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
    assert wrapped.reducer.reductions.staging.num_bytes <= 2 * 4 * NUMEL


def test_a_block_waits_for_all_of_its_parameters_and_another_module_for_its_own():
    shared = nn.Linear(2, 2)
    blocks = nn.ModuleList([nn.Sequential(shared, nn.Linear(2, 2)), nn.Sequential(nn.Tanh(), shared)])
    root = nn.ModuleDict({"blocks": blocks, "outer": nn.Sequential(nn.Linear(2, 2), nn.PReLU())})
    waited: list[list[nn.Parameter]] = []
    handles = hook_readers(root, waited.append)
    x = torch.ones(1, 2)
    for module, expected in [
        (blocks[0], [[*blocks[0].parameters()]]),
        (blocks[1], [[*shared.parameters()]]),  # in whichever order the blocks run
        (root["outer"], [[*root["outer"][0].parameters()], [*root["outer"][1].parameters()]]),
        (shared, []),
    ]:
        waited.clear()
        module(x)
        assert [list(map(id, params)) for params in waited] == [list(map(id, params)) for params in expected]
    assert len(handles) == 4
    for handle in handles:
        handle.remove()
    waited.clear()
    blocks[0](x)
    assert waited == []
