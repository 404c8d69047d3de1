"""The settings of ZeRO."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from parallel.errors import ConfigError
from zero.stage import STAGES, Lifetime, ShardingPolicy

Accumulate = Literal["reduce", "local"]


@dataclass(frozen=True)
class ZeroConfig:
    """The partition of model states over the data-parallel ranks, and the portions in which they are communicated."""

    stage: int = 2
    """0: plain data parallelism; 1: optimizer states are partitioned; 2: gradients too; 3: parameters too."""
    bucket_numel: int | None = 2**25
    """C_B: the number of elements that are communicated, cast or summed at once, however large the model is; null: all
    of them at once. With offload.mode=auto the size of chunks is searched instead."""
    overlap: bool = True
    """Let reductions run while backward goes on; false: wait for each one at once. The values are equal."""
    accumulate: Accumulate = "reduce"
    """If gradients are partitioned. reduce: they are reduced in every micro-batch; local: full gradients are kept, and
    reduced in the last micro-batch."""
    prefetch_numel: int = 2**27
    """If parameters are partitioned: the number of elements of the next units that are gathered ahead; 0: none. While
    the model is built, it limits the number of elements that are not sharded yet."""
    resident_numel: int = 0
    """If parameters are partitioned: those with fewer elements than this stay gathered, such as norms and biases."""
    defragment: bool = True
    """Allocate the memory of gradients once (M_D of the paper), if full gradients are transient. false: allocate
    staging memory in backward only, and owned gradients from backward to the update; this leaves more memory for the
    forward and more work for the allocator."""
    units: tuple[str, ...] | None = None
    """The modules that are gathered at a time, by patterns such as blocks.*; null: the elements of the module lists."""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ConfigError(f"ZeroConfig.stage={self.stage} does not exist; choose {', '.join(map(str, STAGES))}")
        if self.bucket_numel is not None and self.bucket_numel < 1:
            raise ConfigError(
                f"ZeroConfig.bucket_numel={self.bucket_numel} is below 1; choose 1 or more, or null for a single bucket"
            )
        if self.accumulate not in get_args(Accumulate):
            raise ConfigError(
                f"ZeroConfig.accumulate={self.accumulate} is unknown; choose {' or '.join(get_args(Accumulate))}"
            )
        for name in ("prefetch_numel", "resident_numel"):
            if getattr(self, name) < 0:
                raise ConfigError(f"ZeroConfig.{name}={getattr(self, name)} is below 0; choose 0 for none")

    @property
    def policy(self) -> ShardingPolicy:
        """The stage's row of the table, with what the other settings change in it."""
        return self.at_stage(self.stage)

    def at_stage(self, stage: int) -> ShardingPolicy:
        """Return the policy that these settings give another stage."""
        row = replace(STAGES[stage], owned_grads=Lifetime.PERSISTENT if self.defragment else Lifetime.TRANSIENT)
        return replace(row, full_grads=Lifetime.PERSISTENT) if self.accumulate == "local" else row
