"""Settings of profiles and of dry runs."""

from dataclasses import dataclass
from typing import Literal

from parallel.errors import ConfigError
from parallel.fields import FilePath, NonNegative, Positive, Ranks, check_fields


@dataclass(frozen=True)
class ProfileSettings:
    """A profile of a few steps, which shows where their time is spent, and a check of their order."""

    steps: tuple[Positive, Positive] | None = None
    """First and last step to time and to trace; null: do not profile."""
    ranks: tuple[NonNegative, ...] = (0,)
    """Ranks that write a trace to run.dir/profile/rank-*.json; all ranks are timed."""
    collectives_step: NonNegative = 5
    """Step whose collectives the first rank records in run.dir/collectives.json, for comparison with a dry run or
    another run. This step is slower than others. 0: record none."""
    check_streams: bool = False
    """Follow every operation, and end the run after the first step in which operations would race on a GPU, with a line
    for each pair: for changes of the code, in runs on CPUs and dry runs. Steps take several times as long."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is not None and self.steps[0] > self.steps[1]:
            raise ConfigError(f"ProfileSettings.steps={list(self.steps)}: the first is after the last; choose [10, 12]")


@dataclass(frozen=True)
class DryRunSettings:
    """A dry run: a few steps of one rank of any world, on tensors without values, to see memory, traffic and time."""

    world_size: Ranks | None = None
    """Number of ranks of the imitated run; null: train instead of a dry run."""
    rank: NonNegative = 0
    """The rank whose steps are run."""
    cluster: FilePath | None = None
    """File that describes the machines, such as configs/clusters/dgx-2.yaml; null: one large node, and no projection of
    time."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Communication backend that is imitated; gloo needs more buffers than nccl, to receive into."""
    trace: FilePath | None = None
    """File to write the projected timeline to, for Perfetto or chrome://tracing; needs dry_run.cluster."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.world_size is not None and self.rank >= self.world_size:
            raise ConfigError(
                f"DryRunSettings.rank={self.rank} is not one of the {self.world_size} ranks; choose 0 to "
                f"{self.world_size - 1}"
            )
        if self.trace and not self.cluster:
            raise ConfigError(
                f"DryRunSettings.trace={self.trace} needs a cluster to project times on, and dry_run.cluster is null; "
                "choose one, such as dry_run.cluster=configs/clusters/dgx-2.yaml"
            )
