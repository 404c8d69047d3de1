"""The settings that the equality program compares with one process: combinations that contain every pair of values."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero.activations.checkpointed_blocks import StoreChoice
from zero.settings.config import Mode

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
    """Return a few cases that contain every pair of values that fits so many ranks."""
    factors: dict[str, Sequence[Any]] = {"stage": STAGES, "num_shard_groups": SHARD_GROUPS, "tensor_size": TENSOR_SIZES}
    factors |= {"store": STORES, "offload": OFFLOADS}
    return [Case(**values) for values in covering(factors, 2, lambda values: Case(**values).fits(num_ranks))]


def covering(
    factors: Mapping[str, Sequence[Any]], size: int, is_possible: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Choose possible combinations that contain all pairs (`size` 2), or triples, of values that one of them contains.

    Greedily: each is the one of the product that covers most of those still missing.
    """
    combinations = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    product = list(filter(is_possible, combinations))
    bits: dict[tuple, int] = defaultdict(lambda: 1 << len(bits))  # a pair is a bit: sets of pairs are counted fast
    covered_by = [sum(bits[values] for values in itertools.combinations(c.items(), size)) for c in product]
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(product)), key=lambda number: (covered_by[number] & missing).bit_count())
        chosen.append(product[best])
        missing &= ~covered_by[best]
    return chosen
