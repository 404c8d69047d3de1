"""AdamW with moments in 8 bits, of which a block has one scale, and in bf16, which are rounded at random."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig
from zero.updates.adamw8bit import BLOCK, AdamW8bit, bounds_of, dequantized, quantized, table_of
from zero.updates.adamw_bf16 import AdamWBf16, rounded

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_tables_have_256_values_in_order(is_signed):
    table = table_of(is_signed)
    assert len(table) == len(set(table)) == 256
    assert table == sorted(table)
    assert (table[-1], table[0] == 0.0, 0.0 in table) == (1.0, not is_signed, True)
    assert (
        max(b - a for a, b in pairwise(table)) <= 0.9 / 64 + 1e-9
    )  # of the largest power of ten, which has 64 or 128 intervals


def test_a_value_is_stored_as_the_nearest_one_of_its_block():
    torch.manual_seed(0)
    values = torch.randn(3 * BLOCK + 7) * torch.logspace(-8, 3, 3 * BLOCK + 7)
    table = torch.tensor(table_of(True))
    numbers, scales = quantized(values, bounds_of(table, True))
    assert (numbers.dtype, len(numbers), len(scales)) == (torch.uint8, len(values), 4)
    found = dequantized(numbers, scales, table)
    for start in range(0, len(values), BLOCK):
        own, restored = values[start : start + BLOCK], found[start : start + BLOCK]
        largest = own.abs().max()
        nearest = (own[:, None] / largest - table).abs().min(dim=1).values * largest
        assert ((own - restored).abs() <= nearest * (1 + 1e-4) + 1e-6 * largest).all()
    assert quantized(torch.zeros(5), bounds_of(table, True))[1].tolist() == [0.0]


def test_only_zero_is_stored_as_a_second_moment_of_zero():
    values = torch.tensor([0.0, 1e-30, 1e-7, 3e-7, 1.0])
    numbers, _ = quantized(values, bounds_of(torch.tensor(table_of(False)), False))
    assert numbers.tolist() == [0, 1, 1, 1, 255]


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_no_update_is_many_times_the_learning_rate(beta2):
    """Gradients in a block differ by powers of ten, and most are absent in a step, as those of rare words."""
    param, generator = nn.Parameter(torch.zeros(4, BLOCK)), torch.Generator().manual_seed(0)
    optimizer = AdamW8bit([param], lr=1.0, betas=(0.9, beta2), weight_decay=0.0)
    for _ in range(300):
        is_present = torch.rand(4, BLOCK, generator=generator) < 0.1
        param.grad = torch.randn(4, BLOCK, generator=generator) * is_present * torch.logspace(-6, 0, BLOCK)
        before = param.detach().clone()
        optimizer.step()
        assert (param - before).abs().max() < 2  # as AdamW, whose largest one is 1.0 or 1.5


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWBf16])
def test_the_updates_are_nearly_those_of_adamw(kind):
    """The moments of a step are exact, and those before it have an error of at most 1/64 of the block's largest."""
    torch.manual_seed(0)
    own, expected = (nn.Parameter(torch.linspace(-1, 1, 1000).view(10, 100)) for _ in range(2))
    optimizers = kind([own], lr=1e-2), torch.optim.AdamW([expected], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(20):
        own.grad = torch.randn(10, 100)
        expected.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (own - expected).abs().max() < 0.03  # of 20 steps of 0.01
    assert not own.equal(expected)


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWBf16])
def test_the_first_update_is_that_of_adamw(kind):
    """Its moments have not been stored before."""
    settings = {"lr": 0.2, "weight_decay": 0.3, "betas": (0.8, 0.6), "eps": 0.1}
    own, expected = (nn.Parameter(torch.linspace(-1, 1, 1000).view(10, 100)) for _ in range(2))
    for param, optimizer in ((own, kind), (expected, torch.optim.AdamW)):
        param.grad = torch.linspace(-2, 3, 1000).view(10, 100)
        optimizer([param], **settings).step()
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_rounding_is_to_a_neighbor_and_right_in_the_mean():
    """Each of 2^16 equal values gets other bits, so that their mean has no error but that of its sum."""
    for value in (1.0 + 2.0**-9, -3.3e-20, 2e-38, 0.0, 7.0):
        values = torch.full((2**16,), value)
        found = rounded(values, torch.arange(2**16, dtype=torch.int32)).double()
        assert ((found - values).abs() < 2.0**-7 * abs(value)).all() or found.equal(values.double())
        torch.testing.assert_close(found.mean(), values[0].double(), rtol=1e-12, atol=0)


def hash_of(word: int) -> int:
    """Return "lowbias32" of a word, in unsigned arithmetic."""
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


def test_random_bits_are_a_hash_of_seed_step_parameter_and_element():
    """Small gradients leave moments that bf16 cannot add to: without random bits they would stay as they are."""
    params = [nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(3, 5))]
    optimizer = AdamWBf16(params, lr=0.1, betas=(0.5, 0.75), seed=5)
    moments = [torch.zeros(param.numel()) for param in params]
    for step in range(1, 4):
        for param in params:
            param.grad = torch.linspace(1.0, 1.1 + step, param.numel()).view_as(param)
        optimizer.step()
        for number, (param, before) in enumerate(zip(params, moments, strict=True)):
            key = hash_of((hash_of(step + 5) + number) % 2**32)
            bits = torch.tensor([hash_of((n * 0x9E3779B9 + key) % 2**32) for n in range(param.numel())])
            before.copy_(rounded(before.lerp(param.grad.view(-1), 0.5), (bits % 2**16).int()))
            assert optimizer.state[param]["exp_avg"].view(-1).equal(before.bfloat16())


def test_a_group_that_is_added_has_the_bits_of_one_that_was_given():
    found = []
    for adds in (True, False):
        params = [nn.Parameter(torch.ones(300)) for _ in range(2)]
        optimizer = AdamWBf16(params[:1] if adds else [{"params": [param]} for param in params], lr=0.1)
        if adds:
            optimizer.add_param_group({"params": params[1:]})
        for step in range(2):
            for number, param in enumerate(params):
                param.grad = torch.linspace(1, 2 + number, 300) ** step
            optimizer.step()
        found.append(optimizer.state[params[1]]["exp_avg"])
    assert found[0].equal(found[1])


def test_shards_that_cut_blocks_are_refused():
    model = ZeroDataParallel(nn.Linear(40, 30), Axis.trivial("data"), ZeroConfig(1))
    message = r"AdamW8bit updates blocks of 256 elements, and ZeroConfig.alignment=16 lets shards cut them; .*256"
    with pytest.raises(ConfigError, match=message):
        ZeroOptimizer(model, AdamW8bit)
