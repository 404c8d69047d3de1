"""The order in which leaves are added, simulated: the same for every number of units and of ranks in each."""

import pytest
import torch

from parallel.comm_log import CommLog
from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.buckets.leaf_blocks import BlockSums, LeafOrder, check_blocks
from zero.partition.config import ZeroConfig
from zero.partition.stage import Levels


def sum_of(values: list[torch.Tensor], num_blocks: int, num_units: int, unit_size: int) -> torch.Tensor:
    """Return the sum of leaves as the ranks of groups, or groups of one, would add them."""
    of_unit = len(values) // num_units
    sums = []
    for unit in range(num_units):
        inner, outer = Axis("shard", unit_size, 0, CommLog()), Axis("replica", num_units, unit, CommLog())
        order = LeafOrder(
            ZeroConfig(2, sum_over_ranks="leaves", leaf_blocks=num_blocks), Levels(inner, outer, inner, outer)
        )
        blocks, block = BlockSums(), None
        order.num_micro_batches = of_unit // unit_size
        for number, value in enumerate(values[unit * of_unit : (unit + 1) * of_unit]):
            order.num_backwards = 1 + number // unit_size
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
    inner, outer = Axis("shard", 2, 0, CommLog()), Axis("replica", 2, 0, CommLog())
    for stage, accumulate in ((1, "reduce"), (3, "local")):
        config = ZeroConfig(stage, accumulate=accumulate, sum_over_ranks="leaves", leaf_blocks=2, leaf_parts=2)
        with pytest.raises(ConfigError, match=r"leaf_parts=2 .* 2 groups of 2 ranks.*accumulate=reduce"):
            check_blocks(config, Levels(inner, outer, inner, outer))


def test_blocks_need_the_number_of_micro_batches():
    alone = Axis.trivial("data")
    order = LeafOrder(ZeroConfig(1, sum_over_ranks="leaves", leaf_blocks=4), Levels(alone, alone, alone, alone))
    order.num_backwards = 2
    with pytest.raises(ValueError, match=r"None were announced; enter `model\.accumulate"):
        order.begins_block()
    order.num_micro_batches = 3
    with pytest.raises(ValueError, match="3 micro-batches of a step are fewer than 4 blocks"):
        order.begins_block()
