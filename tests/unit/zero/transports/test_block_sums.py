"""The order in which micro-batches are added, simulated: the same for every number of units and of ranks in each."""

import pytest
import torch

from parallel.validation.errors import ConfigError
from zero.transports.block_sums import Blocks, BlockSums, MicroBatchOrder


def sum_of(values: list[torch.Tensor], num_blocks: int, num_units: int, unit_size: int) -> torch.Tensor:
    """Return the sum of terms as the ranks of groups, or groups of one, would add them."""
    of_unit = len(values) // num_units
    sums = []
    for unit in range(num_units):
        order = MicroBatchOrder(Blocks(unit_size, num_units, num_blocks), unit * unit_size)
        blocks, block = BlockSums(), None
        order.num_micro_batches = of_unit // unit_size
        for number, value in enumerate(values[unit * of_unit : (unit + 1) * of_unit]):
            order.number = 1 + number // unit_size
            if order.begins_block(number % unit_size):
                blocks.push(block)
                block = None
            block = value.clone() if block is None else block.add_(value)
        sums.append(blocks.add_to(block))
        assert order.factor == 1 / len(values)
    return BlockSums(sums).pop_total()


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 6, 7, 8, 12])
@pytest.mark.parametrize("num_leaves", [12, 48, 60, 840])
def test_units_of_any_size_add_in_the_same_order(num_leaves, num_blocks):
    values = list(torch.randn(num_leaves, 50, generator=torch.Generator().manual_seed(0)).unbind())
    expected = sum_of(values, num_blocks, 1, 1)
    for unit_size in (1, 2, 3, 4, 5, 7):
        for num_units in (1, 2, 3, 4, 6, 7, 8):
            of_unit, rest = divmod(num_blocks, num_units)
            is_power = not rest and of_unit & (of_unit - 1) == 0
            if num_leaves % (unit_size * num_units) == 0 and (num_units == 1 or is_power):
                assert sum_of(values, num_blocks, num_units, unit_size).equal(expected)
    if num_blocks > 1:
        assert not sum_of(values, 1, 1, 1).equal(expected)


def test_kept_gradients_of_parts_are_not_added_by_groups():
    with pytest.raises(ConfigError, match=r"leaf_parts=2 .* 2 groups of 2 ranks.*accumulate=reduce"):
        Blocks(2, 2, num_blocks=2, num_parts=2, keeps_full=True).check()


def test_blocks_need_the_number_of_micro_batches():
    order = MicroBatchOrder(Blocks(1, 1, num_blocks=4, keeps_full=True), 0)
    order.number = 2
    with pytest.raises(ValueError, match=r"None were announced; enter `model\.accumulate"):
        order.begins_block()
    order.num_micro_batches = 3
    with pytest.raises(ValueError, match="3 micro-batches of a step are fewer than 4 blocks"):
        order.begins_block()
