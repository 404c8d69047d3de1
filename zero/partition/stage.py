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


class GradientTypes(NamedTuple):
    """The data types of the gradients of one flat buffer."""

    accumulate: torch.dtype
    """Of the sums of micro-batches: the full gradients if these persist, else the owned shards."""
    reduce: torch.dtype
    """Of the messages, and of staged buckets if full gradients are transient."""


@dataclass(frozen=True)
class ShardingPolicy:
    """A row of the table of stages: the states that are sharded, and the lifetimes of full buffers."""

    shard_optimizer: bool
    """True if a rank owns 1/N of the optimizer's states; false if it owns all of them."""
    full_grads: Lifetime
    full_params: Lifetime
    owned_grads: Lifetime = Lifetime.PERSISTENT
    """Used if full gradients are transient: the lifetime of owned gradients on the accelerator and of the staging pool.
    PERSISTENT allocates both once (M_D, section 6.3); TRANSIENT frees the pool after backward, and owned gradients
    after the update."""

    def axes(self, data: Axis) -> tuple[Axis, Axis]:
        """Return (shard axis, replica axis): gradients are reduce-scattered along one, all-reduced along the other.

        If states are sharded and the data axis has parts, these are its inner and outer part: hierarchical sharding.
        """
        if not self.shard_optimizer:
            return data.without_peers(), data
        return data.parts or (data, data.without_peers())

    def compared_axis(self, data: Axis) -> Axis:
        """Return the axis of the ranks that must run the same micro-batches: none if only a step communicates."""
        return data if Lifetime.TRANSIENT in (self.full_grads, self.full_params) else data.without_peers()


STAGES = {
    0: ShardingPolicy(False, Lifetime.PERSISTENT, Lifetime.PERSISTENT),  # plain data parallelism
    1: ShardingPolicy(True, Lifetime.PERSISTENT, Lifetime.PERSISTENT),  # P_os
    2: ShardingPolicy(True, Lifetime.TRANSIENT, Lifetime.PERSISTENT),  # P_os+g
    3: ShardingPolicy(True, Lifetime.TRANSIENT, Lifetime.TRANSIENT),  # P_os+g+p
}
