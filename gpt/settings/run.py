"""Settings of what a run writes, how it ends, what guards it, and of profiles and dry runs."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from parallel.validation.errors import ConfigError
from parallel.validation.fields import FilePath, NonNegative, Positive, Range, Ranks, checked


@checked
class CheckpointSettings:
    """Checkpoints, which are written to run.dir/checkpoints and from which a run resumes."""

    every: NonNegative = 0
    """Steps between checkpoints; 0: at no fixed steps. Training then waits for each checkpoint, and no copy is made."""
    every_minutes: Annotated[float, Range(0, 1e7)] = 30.0
    """A checkpoint is also saved if the newest one is this many minutes old; 0: never."""
    last: bool = True
    """Save a checkpoint after the last step; false: only if every is above 0. A run that a signal ends saves one in any
    case, as before a time limit."""
    keep: Positive = 2
    """Number of checkpoints to keep; older ones are deleted."""
    keep_every: NonNegative = 0
    """Checkpoints of steps that are multiples of this are never deleted, and do not count in keep; 0: none. A multiple
    of every."""
    asynchronous: bool = True
    """Copy the state to host memory and write it to disk while training goes on, if every is above 0; false: training
    waits for the disk, and no copy is made."""
    weights: bool = False
    """With each checkpoint, also write the weights to run.dir/weights, in train.precision and in the format of
    transformers."""
    resume: FilePath = "auto"
    """auto: resume from the newest checkpoint in run.dir if there is one; never: start from the beginning; or the
    folder of a checkpoint to begin from, also of FSDP2 or DeepSpeed (docs/checkpoints.md): if it is of another run, by
    the first start."""
    fall_back: bool = False
    """If the newest checkpoint is damaged, go on from the one before it, with a warning and an alert; false: end with
    an error."""
    snapshot_every: NonNegative = 0
    """Steps between snapshots, which are checkpoints in the memory of the nodes; 0: never. A run resumes from the
    newest one if it is newer than the newest checkpoint, also after the loss of a node (docs/survive.md)."""
    snapshot_dir: FilePath = "/dev/shm/zero-gpt"
    """Folder for snapshots on each node, in a file system that is in memory."""

    def __post_init__(self) -> None:
        if self.keep_every and (not self.every or self.keep_every % self.every):
            raise ConfigError(
                f"CheckpointSettings.keep_every={self.keep_every} is not a multiple of every={self.every}; choose "
                f"{max(self.keep_every // self.every, 1) * self.every if self.every else 0}"
            )

    @property
    def is_async(self) -> bool:
        """True if a copy of the state is kept in host memory, from which checkpoints are written beside training."""
        return self.asynchronous and self.every > 0

    def snapshot_folder(self, run_dir: str | Path) -> Path:
        """Return the folder of a run's snapshots on each node."""
        path = Path(run_dir).absolute()
        return Path(self.snapshot_dir) / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


@checked
class GuardSettings:
    """The response to bad losses, which are not finite or spike, and the comparison of replicas."""

    policy: Literal["skip", "stop", "roll_back"] = "skip"
    """A step with a bad loss never updates the weights. skip: training then goes on; stop: the run ends; roll_back: the
    run continues from the newest checkpoint and leaves out the samples in between. An overflow in fp16 is not a bad
    loss."""
    spike_factor: Annotated[float, Range(above=1, at_most=1e9)] | None = None
    """A loss is bad if it is more than this many times the running mean of the losses before it; null: a loss is bad
    only if it is not finite."""
    max_roll_backs: NonNegative = 3
    """Number of times that a run rolls back; at the next bad loss it ends."""
    max_skipped_steps: Positive | None = 50
    """The run ends if this many steps in a row update nothing, since gradients or losses are bad; it is checked at
    logged steps. null: it goes on."""
    check_replicas_every: NonNegative = 0
    """Steps between comparisons of the weights of all replicas, by checksum; 0: never. A comparison waits for the
    device."""
    audit_every: NonNegative = 0
    """Steps between audits, in which each rank computes a micro-batch of another rank again and compares hashes of its
    gradients; master weights and optimizer states are checked in every step. 0: never. Needs
    train.reproducible=layout."""

    @property
    def checks_losses(self) -> bool:
        """True if the loss of each step has to be checked; a step with a non-finite gradient is skipped in any case."""
        return self.policy != "skip" or self.spike_factor is not None


@checked
class RunSettings:
    """The folder of the run, what is written there, and how long a run may hang."""

    dir: FilePath = "runs/default"
    """Folder to which the run writes config.yaml, metrics.jsonl, loss.png and its checkpoints."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: train on GPUs, or on CPUs if the node has no GPU; cpu: train on CPUs, also if it has GPUs."""
    hang_seconds: Annotated[float, Range(0, 1e7)] = 600.0
    """If no rank makes progress for this many seconds, the rank that holds up the others is named, each rank writes its
    last collectives to run.dir/hang, and the job ends. After five steps for 0.3 of them, but at least for 180 s and
    ten steps. A collective that takes three times as long, and 10 minutes, fails by itself. 0: wait forever."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, to run.dir/tensorboard."""

    def __post_init__(self) -> None:
        if self.tensorboard and find_spec("tensorboard") is None:
            raise ConfigError("RunSettings.tensorboard=true needs a package; pip install tensorboard, or choose false")


@checked
class WandbSettings:
    """Logging to Weights & Biases."""

    mode: Literal["online", "offline", "disabled"] = "disabled"
    """online: log as the run goes on, with an API key from the environment; offline: write under run.dir, for `wandb
    sync` later; disabled: do not log."""
    project: str = "zero-gpt"
    """Project that the run belongs to."""
    name: str | None = None
    """Name of the run; null: the name of the folder run.dir."""
    group: str | None = None
    """Group that the run belongs to, such as the runs of one experiment; null: none."""
    tags: tuple[str, ...] = ()
    """Tags of the run, to find it by."""


@checked
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
        if self.steps is not None and self.steps[0] > self.steps[1]:
            raise ConfigError(f"ProfileSettings.steps={list(self.steps)}: the first is after the last; choose [10, 12]")


@checked
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
