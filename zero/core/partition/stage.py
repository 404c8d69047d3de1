"""The stages of ZeRO (paper, section 5) as rows of a table. No other file computes anything from a stage's number."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from parallel.mesh import Axis


class Lifetime(Enum):
    """The time for which a buffer is allocated."""

    PERSISTENT = "allocated once, for the whole run"
    TRANSIENT = "allocated only while it is in use"


class Division(Enum):
    """The ranks over which a state is divided."""

    NONE = "every data-parallel rank has all of it"
    GROUP = "the ranks of a group divide it, and groups replicate each other; without groups, all ranks divide it"
    ALL = "all data-parallel ranks divide it: a group its shards, and ranks at the same place of every group each shard"

    def num_ranks(self, data_size: int, group_size: int) -> int:
        """Return the number of ranks that divide the state, of `data_size` in groups of `group_size`."""
        return {Division.NONE: 1, Division.GROUP: group_size, Division.ALL: data_size}[self]


class GradientTypes(NamedTuple):
    """The data types of the gradients of one flat buffer."""

    accumulate: torch.dtype
    """Of the sums of micro-batches: the full gradients if these persist, else the owned shards."""
    reduce: torch.dtype
    """Of the messages, and of staged buckets if full gradients are transient."""


@dataclass(frozen=True)
class ShardingPolicy:
    """A row of the table of stages: where each state is divided. The extents never grow from left to right."""

    optimizer: Division
    gradients: Division
    parameters: Division
    keeps_full_grads: bool = False
    """True if full gradients are kept in each case, and reduced once a step."""
    owned_grads: Lifetime = Lifetime.PERSISTENT
    """Used if full gradients are transient: the lifetime of owned gradients on the accelerator and of the staging pool.
    PERSISTENT allocates both once (M_D, section 6.3); TRANSIENT frees the pool after backward, and owned gradients
    after the update."""

    @property
    def divides_optimizer(self) -> bool:
        """True if no rank owns all of the optimizer's states."""
        return self.optimizer is not Division.NONE

    @property
    def full_grads(self) -> Lifetime:
        """The lifetime of the full gradients."""
        is_kept = self.gradients is Division.NONE or self.keeps_full_grads
        return Lifetime.PERSISTENT if is_kept else Lifetime.TRANSIENT

    @property
    def full_params(self) -> Lifetime:
        """The lifetime of the full parameters."""
        return Lifetime.PERSISTENT if self.parameters is Division.NONE else Lifetime.TRANSIENT

    def compared_axis(self, data: Axis) -> Axis:
        """Return the axis of the ranks that must run the same micro-batches: none if only a step communicates."""
        return data if Lifetime.TRANSIENT in (self.full_grads, self.full_params) else data.without_peers()


STAGES = {
    0: ShardingPolicy(Division.NONE, Division.NONE, Division.NONE),  # plain data parallelism
    1: ShardingPolicy(Division.GROUP, Division.NONE, Division.NONE),  # P_os
    2: ShardingPolicy(Division.GROUP, Division.GROUP, Division.NONE),  # P_os+g
    3: ShardingPolicy(Division.GROUP, Division.GROUP, Division.GROUP),  # P_os+g+p
}
