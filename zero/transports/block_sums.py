"""The order in which the gradients of a step's micro-batches are added: the same on any number of ranks.

terms      0 1 2 | 3 4 5 | 6 7 8 | 9 10 11     of all ranks, cut into blocks; added one after the other, in fp32
blocks       a   |   b   |   c   |    d
sum              (a + b) + (c + d)             along a binary tree; what is missing at its end is left out

Terms are computed by units: ranks that keep full gradients, else groups of ranks. Each one has consecutive blocks that
are a subtree, so it sends one sum, and while it adds them, it keeps at most one more for each level of its subtree.
Neighboring ranks may each compute a part of the same micro-batches. If they keep full gradients, each part has blocks
of its own, and the sums of the parts are added last: the number of ranks changes neither.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from parallel.validation.errors import ConfigError


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


@dataclass(frozen=True)
class Blocks:
    """The blocks of a step's micro-batches, and the units of ranks that add them."""

    group_size: int
    num_groups: int
    num_blocks: int = 1
    num_parts: int = 1
    """The number of neighboring ranks that compute a part of each micro-batch."""
    keeps_full: bool = False
    """True if full gradients persist, and are reduced once a step."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all groups."""
        return self.group_size * self.num_groups

    @property
    def num_units(self) -> int:
        """The number of units, ranks or groups of them, that each add up consecutive micro-batches of a step."""
        return self.num_ranks // self.num_parts if self.keeps_full else self.num_groups

    def check(self) -> None:
        """Raise ConfigError if the blocks cannot be divided over the units."""
        num_parts = self.num_parts if self.keeps_full else 1
        if num_parts > 1 and min(self.group_size, self.num_groups) > 1:
            raise ConfigError(
                f"ZeroConfig.leaf_parts={num_parts} of each micro-batch with full gradients that are kept: their sums "
                f"are added last, which {self.num_groups} groups of {self.group_size} ranks cannot; choose "
                "ZeroConfig.stage=2 or 3 with ZeroConfig.accumulate=reduce, or one group of ranks"
            )
        for num_units in {self.num_units, max(1, self.num_groups // num_parts)}:
            of_unit, rest = divmod(self.num_blocks, num_units)
            if num_units > 1 and (rest or of_unit & (of_unit - 1) or not of_unit):
                choice = num_units
                while choice < self.num_blocks:
                    choice *= 2
                raise ConfigError(
                    f"ZeroConfig.leaf_blocks={self.num_blocks} of micro-batches cannot be divided over {num_units} "
                    f"ranks or groups that each add up their own; choose {choice}, or ZeroConfig.stage=2 or 3 with "
                    "ZeroConfig.accumulate=reduce and one group of ranks"
                )

    def kept_bytes(self, gradient_bytes: float) -> float:
        """Return the most bytes of sums of blocks that a rank holds between micro-batches.

        A unit adds B consecutive blocks, the last one where gradients accumulate in any case. The sums of the others
        are added to each other like the digits of a binary number, so there are log2(B) of them, rounded down, and
        fewer if shards of gradients are added and a micro-batch has parts of several blocks. They are sums of full
        gradients, of `gradient_bytes`, if these persist, else of the shard in the group.
        """
        num_sums = (self.num_blocks // self.num_units).bit_length() - 1
        return num_sums * gradient_bytes / (1 if self.keeps_full else self.group_size)


class MicroBatchOrder:
    """The terms of this rank's unit in the present step."""

    def __init__(self, blocks: Blocks, rank: int):
        """`rank`: among all groups, of which one follows the other."""
        self._blocks = blocks
        unit_size = blocks.num_ranks // blocks.num_units
        self._unit = rank // unit_size
        self._num_parts, self._num_at_once = (blocks.num_parts, 1) if blocks.keeps_full else (1, unit_size)
        self.number = 0  # of the backward that runs, from 1 on
        self.num_micro_batches: int | None = None  # of the present step, if it is known

    @property
    def factor(self) -> float:
        """The factor of the sum of all terms: one over their number."""
        return 1 / (self.number * self._blocks.num_ranks)

    def total(self, sums: Tensor) -> Tensor:
        """Return the total of the sums of ranks or groups, (ranks, n), whose memory is overwritten."""
        parts = [sums[part :: self._num_parts].unbind() for part in range(min(self._num_parts, len(sums)))]
        return BlockSums(BlockSums(part).pop_total() for part in parts).pop_total()

    def begins_block(self, term: int = 0) -> bool:
        """Return whether a block, but the first one of the unit, begins with a term of this micro-batch."""
        num_blocks, num_units = self._blocks.num_blocks, self._blocks.num_units
        if num_blocks == num_units:
            return False
        position = (self.number - 1) * self._num_at_once + term
        if self.num_micro_batches is None or self.number > self.num_micro_batches:
            raise ValueError(
                f"blocks of micro-batches need their number, and backward {self.number} of a step runs where "
                f"{self.num_micro_batches} were announced; enter `model.accumulate(num_micro_batches)` in each step"
            )
        of_unit = self.num_micro_batches * self._num_at_once
        num_terms = num_units * of_unit
        if num_terms < num_blocks:
            raise ValueError(f"{num_terms} micro-batches of a step are fewer than {num_blocks} blocks of them")
        number = self._unit * of_unit + position
        block = -(-number * num_blocks // num_terms)  # the first that begins with this term or a later one
        return position > 0 and block < num_blocks and block * num_terms // num_blocks == number
