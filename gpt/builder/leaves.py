"""The micro-batches of all ranks in one step, in an order that does not depend on how many ranks there are.

micro-batch    |     0     |     1     | ...     of each rank
rank           |  0  |  1  |  0  |  1  |
leaf           |  0  |  1  |  2  |  3  | ...     its samples, its random numbers and its place in every sum are fixed
"""

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
    step: int = 0

    def seed(self, micro_batch: int) -> None:
        """Let the random numbers of this rank's next forward be those of its leaf, whatever was drawn before."""
        leaf = micro_batch * self.data.size + self.data.rank
        torch.manual_seed(derived_seed(f"{self.run_seed}/{self.step}", leaf))

    def mean(self, losses: Tensor) -> Tensor:
        """Return the mean of the losses (micro-batches,) of all ranks, 0-dim in fp64, the same on all of them."""
        own = losses.double()
        of_ranks = own.new_empty(self.data.size * len(own))
        self.data.all_gather(own, out=of_ranks).wait()
        return of_ranks.view(self.data.size, -1).t().reshape(-1).mean()  # the same vector in each layout
