"""The norms of sharded gradients, on one rank: of all and of each layer, a few chunks at a time, or in blocks."""

import pytest
import torch
from torch import Tensor, nn

from lab.observe.memory_tracker import MemoryTracker
from parallel.mesh import Axis
from zero.core.step import grad_norm
from zero.core.step.grad_norm import NUM_NORMS, layer_of
from zero.core.step.loss_scale import LossScale
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig
from zero.transports.block_norm import sums_of_squares

CPU = torch.device("cpu")


def reduced(scale: float = 4.0) -> tuple[ZeroDataParallel, ZeroOptimizer, dict[str, Tensor]]:
    """Return a model of two layers, its optimizer, and what its gradients are; the optimizer has reduced them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    expected = {}
    module(torch.ones(2, 6)).square().sum().backward()
    for name, param in module.named_parameters():
        expected[name], param.grad = param.grad, None
    model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1, bucket_numel=64))
    optimizer = ZeroOptimizer(model, torch.optim.SGD, loss_scale=LossScale(scale))
    (model(torch.ones(2, 6)).square().sum() * scale).backward()
    model.reducer.complete()
    return model, optimizer, expected


@pytest.mark.parametrize("chunk_numel", [3, 2**18])
def test_the_norms_are_those_of_the_gradients_without_the_loss_scale(monkeypatch, chunk_numel):
    monkeypatch.setattr(grad_norm, "CHUNK_NUMEL", chunk_numel)
    model, optimizer, grads = reduced()
    torch.testing.assert_close(optimizer.grad_norm.total(), nn.utils.get_total_norm(grads.values()))
    layers = optimizer.grad_norm.by_layer(model.module)
    assert [*layers] == ["0", "1"]
    for layer, norm in layers.items():
        own = [grad for name, grad in grads.items() if name.startswith(layer)]
        torch.testing.assert_close(norm, nn.utils.get_total_norm(own))


def test_the_norm_allocates_the_bytes_that_it_promises(monkeypatch):
    monkeypatch.setattr(grad_norm, "CHUNK_NUMEL", 2)
    _, optimizer, grads = reduced()
    assert sum(grad.numel() for grad in grads.values()) > 2 * NUM_NORMS
    with MemoryTracker(CPU) as tracker:
        optimizer.grad_norm.total()
        tracker.restart()
        at_rest = tracker.device.total
        optimizer.grad_norm.total()
    assert tracker.device.peak_total - at_rest == optimizer.grad_norm.temporary_bytes


def test_the_layer_of_a_parameter_is_its_block_or_the_first_part_of_its_name():
    names = ("blocks.3.mlp.up.weight", "embedding.weight", "weight", "0.weight", "model.layers.10.experts.2.weight")
    assert [layer_of(name) for name in names] == ["blocks.3", "embedding", "weight", "0", "model.layers.10"]


AXES = Axis.trivial("shard"), Axis.trivial("tensor")


def total(parts: list[Tensor]) -> Tensor:
    zeros = torch.zeros(1, dtype=torch.int64)
    return sums_of_squares([(0, part) for part in parts], zeros, AXES, num_blocks=1000)[0]


def test_any_division_at_blocks_has_the_same_bits():
    values = torch.randn(256 * 40 + 3, generator=torch.Generator().manual_seed(0)) * 3
    values[777] = 3e4
    whole = total([values])
    assert total(list(values.split(256))[::-1]).equal(whole)
    assert total([values[5120:], values[:5120]]).equal(whole)
    torch.testing.assert_close(whole, values.double().square().sum(), rtol=1e-12, atol=0)


def test_small_numbers_of_any_type_are_counted():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        values = torch.full((300,), 2.0**-60, dtype=dtype)
        torch.testing.assert_close(total([values]), values.double().square().sum(), rtol=1e-12, atol=0)
    assert total([torch.zeros(3)]) == total([]) == 0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_element_that_is_not_finite_makes_the_sum_so(value):
    values = torch.ones(600)
    values[400] = value
    assert not total([values[:256], values[256:]]).isfinite()
