"""The ZeRO stages (paper, section 5) as the policy to a few questions. No stage number appears in any other logic."""

from dataclasses import dataclass
from enum import Enum

from parallel.mesh import Axis


class Lifetime(Enum):
    PERSISTENT = "the full buffer stays allocated from step to step"
    TRANSIENT = "the full buffer exists only while it is in use"


@dataclass(frozen=True)
class ShardingPolicy:
    shard_optimizer: bool  # does a rank own 1/N of the optimizer's state, or all of it?
    full_grads: Lifetime
    full_params: Lifetime
    owned_grads: Lifetime = Lifetime.PERSISTENT  # where full ones are transient; persistent is M_D

    def axes(self, data: Axis) -> tuple[Axis, Axis]:
        """(shard axis, replica axis): a gradient is reduce-scattered along one, then all-reduced along the other.

        Both are larger than one where the data axis has parts: hierarchical sharding.
        """
        if not self.shard_optimizer:
            return data.alone(), data
        return data.parts or (data, data.alone())


STAGES = {
    0: ShardingPolicy(False, Lifetime.PERSISTENT, Lifetime.PERSISTENT),  # plain data parallelism
    1: ShardingPolicy(True, Lifetime.PERSISTENT, Lifetime.PERSISTENT),  # P_os
    2: ShardingPolicy(True, Lifetime.TRANSIENT, Lifetime.PERSISTENT),  # P_os+g
    3: ShardingPolicy(True, Lifetime.TRANSIENT, Lifetime.TRANSIENT),  # P_os+g+p
}
