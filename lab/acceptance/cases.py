"""The settings that the equality program compares with one process: combinations that contain every pair of values."""

import itertools
from dataclasses import asdict, dataclass

from zero.activations.checkpointed_blocks import StoreChoice
from zero.memory.placement import Mode

STAGES = (0, 1, 2, 3)
SHARD_GROUPS = (1, 2)
TENSOR_SIZES = (1, 2, 4)
STORES: tuple[StoreChoice, ...] = ("none", "keep", "partition", "partition_host")
OFFLOADS: tuple[Mode, ...] = ("accelerator", "host")


@dataclass(frozen=True)
class Case:
    """One combination. ZeRO shards over `num_shard_groups` groups of equal size."""

    stage: int
    num_shard_groups: int
    tensor_size: int
    store: StoreChoice
    offload: Mode

    def shard_size(self, num_ranks: int) -> int | None:
        """Return `parallel.shard_size` on so many ranks; None: ZeRO shards over all data-parallel ranks."""
        return None if self.num_shard_groups == 1 else num_ranks // self.tensor_size // self.num_shard_groups

    def fits(self, num_ranks: int) -> bool:
        """Return True if so many ranks can run the case: only tensor ranks can partition activations."""
        is_divisible = num_ranks % (self.tensor_size * self.num_shard_groups) == 0
        return is_divisible and (self.store != "partition" or self.tensor_size > 1)

    def __str__(self) -> str:
        groups = f", {self.num_shard_groups} shard groups" if self.num_shard_groups > 1 else ""
        return f"stage {self.stage}{groups}, tensor {self.tensor_size}, store {self.store}, states on {self.offload}"


def cases_for(num_ranks: int) -> list[Case]:
    """Return a few cases that contain every pair of values that fits so many ranks, chosen greedily."""
    factors = STAGES, SHARD_GROUPS, TENSOR_SIZES, STORES, OFFLOADS
    product = [case for values in itertools.product(*factors) if (case := Case(*values)).fits(num_ranks)]
    pairs = {case: set(itertools.combinations(asdict(case).items(), 2)) for case in product}
    missing: set = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(product, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen
