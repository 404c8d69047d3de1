"""Parameters of a wrapped module: which of them is warned of, and what is as in plain torch."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from parallel.mesh import Axis
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig


def wrapped(stage: int = 2) -> ZeroDataParallel:
    return ZeroDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Axis.trivial("data"), ZeroConfig(stage))


def trained() -> tuple[ZeroDataParallel, ZeroOptimizer]:
    model = wrapped()
    return model, ZeroOptimizer(model, torch.optim.SGD, lr=0.1)


def step(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> list[str]:
    """Run a step; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return [str(warning.message) for warning in caught]


def test_a_parameter_that_was_added_is_named_once_and_only_if_it_could_be_trained():
    model, optimizer = trained()
    assert step(model, optimizer) == []
    first, second = model.module
    first.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    assert step(model, optimizer) == []
    first.added = nn.Parameter(torch.ones(1))
    (message,) = step(model, optimizer)
    assert message.startswith("0.added was added after the module was wrapped, and is not trained; call `unwrap()`")
    assert step(model, optimizer) == []
    second.later = nn.Parameter(torch.ones(1))
    (message,) = step(model, optimizer)
    assert message.startswith("1.later was added")


def test_a_copy_of_a_parameter_is_plain_and_copied_once():
    model = wrapped()
    weight, bias = model.module[0].weight, model.module[0].bias
    weight.note = ["of the user"]
    bias.requires_grad_(False)
    first, second, other = copy.deepcopy([weight, weight, bias])
    assert first is second
    assert type(first) is nn.Parameter
    assert (first.equal(weight), first.note) == (True, ["of the user"])
    assert first.note is not weight.note
    assert (first.requires_grad, other.requires_grad) == (True, False)
    with torch.no_grad():
        first.zero_()
    assert not weight.equal(first)


def test_a_parameter_whose_values_are_sharded_has_a_name_instead():
    model = wrapped(3)
    weight = model.module[1].weight
    name = "1.weight, a torch.float32 of shape (4, 4) inside ZeroDataParallel"
    assert (repr(weight), f"{weight:>100}") == (name, name.rjust(100))


def test_data_that_is_set_to_itself_is_not_written():
    weight = wrapped().module[0].weight
    version = weight._version
    weight.data = weight
    assert weight._version == version


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parametrizations_that_are_removed_leave_what_they_computed(stage: int):
    """Torch sets the storage of the parameter, which is then trained on."""
    model = wrapped(stage)
    layer, optimizer = model.module[1], ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    with model.gathered():
        register_parametrization(layer, "bias", nn.Tanh())
        expected = layer.bias.detach().clone()
        remove_parametrizations(layer, "bias")
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with model.gathered():
        torch.testing.assert_close(layer.bias.detach(), expected - 0.1)


def test_a_parameter_is_not_set_to_a_storage():
    model = wrapped()
    with pytest.raises(ValueError, match="cannot be set to a storage; copy values to it"):
        model.module[0].weight.set_(torch.zeros(16).untyped_storage())
