"""The micro-batches of all ranks in one step, in an order that does not depend on how many ranks there are.

micro-batch    |     0     |     1     | ...     of each rank of a unit, in which gradients are added
rank           |  0  |  1  |  0  |  1  |
leaf           |  0  |  1  |  2  |  3  | ...     its samples, its random numbers and its place in every sum are fixed

The leaves of the next unit follow those of the last micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.mesh import Axis
from parallel.tensor.random_streams import derived_seed


@dataclass(frozen=True)
class Leaves:
    """The leaves of step number `step`, of which each rank of `data` computes some."""

    data: Axis
    run_seed: int
    num_units: int
    step: int = 0
    exchange: Callable[[Tensor], Tensor] | None = None
    """Gathers the losses, (ranks, n), when the gradients of all leaves are computed, before anything is updated."""

    def seed(self, micro_batch: int, num_micro_batches: int, shift: int = 0) -> None:
        """Let the random numbers of this rank's next forward be those of its leaf, whatever was drawn before.

        With `shift`, of the leaf of the rank that is so many places behind this one.
        """
        unit_size = self.data.size // self.num_units
        unit, rank = divmod((self.data.rank + shift) % self.data.size, unit_size)
        leaf = (unit * num_micro_batches + micro_batch) * unit_size + rank
        torch.manual_seed(derived_seed(f"{self.run_seed}/{self.step}", leaf))

    def mean(self, losses: Tensor) -> Tensor:
        """Return the mean of the losses (micro-batches,) of all ranks, 0-dim in fp64, the same on all of them."""
        of_ranks = (self.exchange or self.data.gather_by_rank)(losses.double())
        by_unit = of_ranks.reshape(self.num_units, -1, len(losses))  # (units, ranks of one, micro-batches)
        return by_unit.transpose(1, 2).reshape(-1).mean()  # the same vector in each layout
