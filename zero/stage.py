"""The stages of ZeRO (paper, section 5) as rows of a table. No other file knows a stage by its number."""

from dataclasses import dataclass
from enum import Enum

from parallel.mesh import Axis


class Lifetime(Enum):
    """The time for which a buffer is allocated."""

    PERSISTENT = "allocated once, for the whole run"
    TRANSIENT = "allocated only while it is in use"


@dataclass(frozen=True)
class ShardingPolicy:
    """A row of the table of stages: the states that are sharded, and the lifetimes of full buffers."""

    shard_optimizer: bool
    """True if a rank owns 1/N of the optimizer's states; false if it owns all of them."""
    full_grads: Lifetime
    full_params: Lifetime
    owned_grads: Lifetime = Lifetime.PERSISTENT
    """If full gradients are transient: the lifetime of the gradients that a rank owns, and of the memory that full ones
    pass through. Persistent is M_D (section 6.3)."""

    def axes(self, data: Axis) -> tuple[Axis, Axis]:
        """Return (shard axis, replica axis): gradients are reduce-scattered along one, all-reduced along the other.

        If the data axis has parts, they are these: hierarchical (hybrid) sharding.
        """
        if not self.shard_optimizer:
            return data.without_peers(), data
        return data.parts or (data, data.without_peers())


STAGES = {
    0: ShardingPolicy(False, Lifetime.PERSISTENT, Lifetime.PERSISTENT),  # plain data parallelism
    1: ShardingPolicy(True, Lifetime.PERSISTENT, Lifetime.PERSISTENT),  # P_os
    2: ShardingPolicy(True, Lifetime.TRANSIENT, Lifetime.PERSISTENT),  # P_os+g
    3: ShardingPolicy(True, Lifetime.TRANSIENT, Lifetime.TRANSIENT),  # P_os+g+p
}
