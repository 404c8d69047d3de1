"""Sums of squares by blocks: equal bits for any division, right to 1e-12, and not finite where an element is not."""

import pytest
import torch

from parallel.mesh import Axis
from zero.step.block_sums import sums_of_squares

AXES = Axis.trivial("shard"), Axis.trivial("tensor")


def total(parts: list[torch.Tensor]) -> torch.Tensor:
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
