"""The memory of an engine ends with it: no collector of cycles has to run."""

import copy
import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import zero.fp8
from parallel.autograd_internals import DisableTorchFunction
from parallel.mesh import Axis
from zero import (
    ConfigError,
    Direct,
    Home,
    Homes,
    OffloadConfig,
    OnHost,
    ShardedInit,
    ShardedParameterError,
    ZeroConfig,
    ZeroDataParallel,
    ZeroOptimizer,
)
from zero.core.partition.stage import STAGES

LAYOUTS = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 2, "overlap_gather": True},
    {"stage": 3, "units": ["*"], "overlap_gather": True, "resident_numel": 100},
    {"stage": 3, "gather_dtype": "fp8"},
]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # `living` then looks at no object of the tests before
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


def host_homes(device: torch.device) -> Homes:
    host = OnHost(device)
    return Homes(Home(device), host, host)


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


def test_parameters_that_were_sharded_when_their_engine_ended_raise_if_they_are_read():
    module = blocks()
    model, optimizer = train(module, "accelerator", stage=3)
    del model, optimizer
    with pytest.raises(ShardedParameterError, match="was sharded when its ZeroDataParallel ended"):
        module(torch.randn(4, 32))
    with pytest.raises(ConfigError, match="inside a ZeroDataParallel already"):
        ZeroDataParallel(module, Axis.trivial("data"))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: model._replicate_for_data_parallel()])
def test_a_copy_of_an_engine_is_refused(copied):
    model, _ = train(blocks(), "accelerator", stage=3)
    with pytest.raises(TypeError, match=r"cannot be copied; copy the module inside it, in `with model\.gathered\(\)"):
        copied(model)


@pytest.mark.parametrize(
    ("homes", "given", "error"),
    [
        (OnHost, {}, "of class OnHost, not of class Homes"),
        (host_homes, {"offload": OffloadConfig("host")}, "OffloadConfig.mode=host with `homes`"),
        (host_homes, {"device": torch.device("meta")}, "device=meta with `homes` of cpu"),
        (host_homes, {"init": ShardedInit(Axis.trivial("data"), STAGES[3])}, "ShardedInit stores shards where"),
    ],
)
def test_homes_beside_what_contradicts_them_are_refused(homes, given, error):
    with pytest.raises((ConfigError, TypeError), match=error):
        ZeroDataParallel(blocks(), Axis.trivial("data"), ZeroConfig(3), homes=homes(torch.device("cpu")), **given)


def test_a_bucket_moves_only_to_a_home_of_the_model():
    model, optimizer = train(blocks(), "accelerator", stage=2)
    with pytest.raises(ValueError, match="OnHost is no home of this model"):
        optimizer.place(optimizer.buckets[0], OnHost(model.homes.device))
    with pytest.raises(ValueError, match="one other home at most"):
        Homes(model.homes.accelerator, OnHost(model.homes.device), OnHost(model.homes.device))


def test_codes_of_several_transports_are_refused():
    data = Axis.trivial("data")
    two_ranks, config = replace(data, size=2), ZeroConfig(3, gather_dtype="fp8")
    with pytest.raises(ConfigError, match=r"lose digits, in 6 transports.*gather_dtype"):
        ZeroDataParallel(blocks(), data, config, transport=lambda *_: Direct(two_ranks))
