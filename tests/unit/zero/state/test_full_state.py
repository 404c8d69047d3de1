"""The whole state of a module: what its `state_dict` has, in memory of its own."""

import copy
from typing import Any

import torch
from torch import nn

from parallel.mesh import Axis
from zero.engine import ZeroDataParallel
from zero.partition.config import ZeroConfig
from zero.state.export import full_state_dict


class Counted(nn.BatchNorm1d):
    """A layer with parameters, buffers, and a state that is not a tensor."""

    def get_extra_state(self) -> Any:
        return "extra"

    def set_extra_state(self, state: Any) -> None: ...


def test_the_full_state_is_that_of_the_module_in_memory_of_its_own():
    model = ZeroDataParallel(Counted(3), Axis.trivial("data"), ZeroConfig(1))
    model.module.register_parameter("added", nn.Parameter(torch.arange(2.0)))  # after the module was wrapped
    expected = copy.deepcopy(model.module.state_dict())
    found = full_state_dict(model)
    assert [*found] == [*expected]
    assert found.pop("_extra_state") == expected.pop("_extra_state") == "extra"
    for name, value in found.items():
        assert type(value) is torch.Tensor
        assert value.equal(expected[name])
        value.fill_(7)
    assert all(value.equal(expected[name]) for name, value in model.module.state_dict().items() if name in expected)
