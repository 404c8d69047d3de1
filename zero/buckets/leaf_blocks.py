"""The order in which the gradients of a step's micro-batches, its leaves, are added: the same on any number of ranks.

leaves     0 1 2 | 3 4 5 | 6 7 8 | 9 10 11     of all ranks, cut into blocks; added one after the other, in fp32
blocks       a   |   b   |   c   |    d
sum              (a + b) + (c + d)             along a binary tree; what is missing at its end is left out

Leaves are computed by units: ranks that keep full gradients, else groups of ranks. Each one has consecutive blocks that
are a subtree, so it sends one sum, and while it adds them, it keeps at most one more for each level of its subtree.
Neighboring ranks may each compute a part of the same micro-batches. If they keep full gradients, each part has blocks
of its own, and the sums of the parts are added last: the number of ranks changes neither.
"""

from collections.abc import Iterable

from torch import Tensor

from parallel.validation.errors import ConfigError
from zero.partition.config import ZeroConfig
from zero.partition.stage import Levels, Lifetime


class BlockSums:
    """Sums of consecutive blocks, added in place as the digits of a binary counter."""

    def __init__(self, sums: Iterable[Tensor] = ()):
        self._sums: list[tuple[int, Tensor]] = []  # (level, sum of 2**level blocks), of falling levels
        for block in sums:
            self.push(block)

    def push(self, block: Tensor) -> None:
        """Add a block, whose memory belongs to this object from now on."""
        level = 0
        while self._sums and self._sums[-1][0] == level:
            block, level = self._sums.pop()[1].add_(block), level + 1
        self._sums.append((level, block))

    def add_to(self, last: Tensor) -> Tensor:
        """Add all blocks to the last one, in place, and forget them."""
        while self._sums:
            last.add_(self._sums.pop()[1])
        return last

    def pop_total(self) -> Tensor:
        """Return the sum of all blocks, at least one, and forget them."""
        return self.add_to(self._sums.pop()[1])

    def clear(self) -> None:
        """Forget all blocks."""
        self._sums.clear()


class LeafOrder:
    """The leaves of this rank's unit in the present step.

    Raises ConfigError if the blocks cannot be divided over the units.
    """

    def __init__(self, config: ZeroConfig, levels: Levels):
        self._num_blocks, self._num_ranks = config.leaf_blocks, levels.inner.size * levels.outer.size
        self._num_units = config.policy.num_adding_units(*levels.sizes)
        unit_size = self._num_ranks // self._num_units
        rank = levels.outer.rank * levels.inner.size + levels.inner.rank
        self._unit = rank // unit_size
        is_kept = config.policy.full_grads is Lifetime.PERSISTENT
        self._num_parts, self._num_at_once = (config.leaf_parts, 1) if is_kept else (1, unit_size)
        self.num_backwards = 0  # of the present step, up to now
        self.num_micro_batches: int | None = None  # of the present step, if it is known
        check_blocks(config, levels)

    @property
    def factor(self) -> float:
        """The factor of the sum of all leaves: one over their number."""
        return 1 / (self.num_backwards * self._num_ranks)

    def total(self, sums: Tensor) -> Tensor:
        """Return the total of the sums of ranks or groups, (ranks, n), whose memory is overwritten."""
        parts = [sums[part :: self._num_parts].unbind() for part in range(min(self._num_parts, len(sums)))]
        return BlockSums(BlockSums(part).pop_total() for part in parts).pop_total()

    def begins_block(self, number: int = 0) -> bool:
        """Return whether a block, but the first one of the unit, begins with leaf `number` of this micro-batch."""
        if self._num_blocks == self._num_units:
            return False
        position = (self.num_backwards - 1) * self._num_at_once + number
        if self.num_micro_batches is None or self.num_backwards > self.num_micro_batches:
            raise ValueError(
                f"blocks of micro-batches need their number, and backward {self.num_backwards} of a step runs where "
                f"{self.num_micro_batches} were announced; enter `model.accumulate(num_micro_batches)` in each step"
            )
        of_unit = self.num_micro_batches * self._num_at_once
        num_leaves, num_blocks = self._num_units * of_unit, self._num_blocks
        if num_leaves < num_blocks:
            raise ValueError(f"{num_leaves} micro-batches of a step are fewer than {num_blocks} blocks of them")
        leaf = self._unit * of_unit + position
        block = -(-leaf * num_blocks // num_leaves)  # the first that begins with this leaf or a later one
        return position > 0 and block < num_blocks and block * num_leaves // num_blocks == leaf

    def restart(self) -> None:
        """Begin another step."""
        self.num_backwards, self.num_micro_batches = 0, None


def check_blocks(config: ZeroConfig, levels: Levels) -> None:
    """Raise ConfigError if the blocks of leaves cannot be divided over the units that add them."""
    num_blocks, policy = config.leaf_blocks, config.policy
    if not policy.adds_leaves:
        return
    num_parts = config.leaf_parts if policy.full_grads is Lifetime.PERSISTENT else 1
    if num_parts > 1 and min(levels.sizes) > 1:
        raise ConfigError(
            f"ZeroConfig.leaf_parts={num_parts} of each micro-batch with full gradients that are kept: their sums are "
            f"added last, which {levels.outer.size} groups of {levels.inner.size} ranks cannot; choose "
            "ZeroConfig.stage=2 or 3 with ZeroConfig.accumulate=reduce, or one group of ranks"
        )
    for num_units in {policy.num_adding_units(*levels.sizes), max(1, levels.outer.size // num_parts)}:
        of_unit, rest = divmod(num_blocks, num_units)
        if num_units > 1 and (rest or of_unit & (of_unit - 1) or not of_unit):
            choice = num_units
            while choice < num_blocks:
                choice *= 2
            raise ConfigError(
                f"ZeroConfig.leaf_blocks={num_blocks} of micro-batches cannot be divided over {num_units} ranks or "
                f"groups that each add up their own; choose {choice}, or ZeroConfig.stage=2 or 3 with "
                "ZeroConfig.accumulate=reduce and one group of ranks"
            )
