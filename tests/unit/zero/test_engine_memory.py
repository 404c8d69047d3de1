"""The memory of an engine ends with it: no collector of cycles has to run."""

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import zero.fp8
from parallel.autograd_internals import DisableTorchFunction
from parallel.mesh import Axis
from zero import OffloadConfig, ShardedParameterError, ZeroConfig, ZeroDataParallel, ZeroOptimizer

LAYOUTS = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 2, "overlap_gather": True},
    {"stage": 3, "units": ["*"], "overlap_gather": True, "resident_numel": 100},
    {"stage": 3, "gather_dtype": "fp8"},
]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def living() -> set[int]:
    """Return the tensors that have memory."""
    with DisableTorchFunction():  # some are parameters whose reads are reported
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        return {id(each) for each in tensors if each.untyped_storage().nbytes()}


def train(module: nn.Module, mode: str, **layout: object) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    config = ZeroConfig(**{"bucket_numel": 1000} | layout)
    model = ZeroDataParallel(module, Axis.trivial("data"), config, offload=OffloadConfig(mode))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-3)
    for breaks in (False, True, False):
        x = torch.randn(4, 32)
        loss = model(x).sum()
        if breaks:
            loss.register_hook(lambda _: 1 / 0)
        with suppress(ZeroDivisionError):
            loss.backward()
        optimizer.zero_grad() if breaks else optimizer.step()
    return model, optimizer


def blocks() -> nn.Sequential:
    module = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)])
    zero.fp8.convert(module)
    return module


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("mode", ["accelerator", "host"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dropped_engine_leaves_no_tensor(mode, layout):
    train(blocks(), mode, **layout)  # what a process allocates once
    before = living()
    module = blocks()
    model, optimizer = train(module, mode, **layout)
    assert len(living() - before) > 10
    del model, optimizer, module
    assert not living() - before


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("unwraps", [True, False])
def test_a_module_that_stays_is_plain_and_can_be_wrapped_again(unwraps):
    module = blocks()
    model, optimizer = train(module, "accelerator", stage=3 if unwraps else 2)
    with model.gathered():
        expected = {name: param.detach().clone() for name, param in module.named_parameters()}
    if unwraps:
        again = ZeroDataParallel(model.unwrap(), Axis.trivial("data"), ZeroConfig(3))
        del model, optimizer
        with pytest.raises(ShardedParameterError):  # the new engine watches it
            module[0][0].weight.sum()
        model, optimizer = again, None
        again.unwrap()
        del again
    before = living()
    del model, optimizer
    assert living() < before
    assert all(type(param) is nn.Parameter for param in module.parameters())
    assert all(param.equal(expected[name]) for name, param in module.named_parameters())
    module(torch.randn(4, 32)).sum().backward()
    assert all(param.grad is not None for param in module.parameters())
    module.zero_grad()
    train(module, "accelerator", stage=3)
