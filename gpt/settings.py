"""All settings of a run: one tree of frozen dataclasses, read from YAML files and dotted options, checked at once."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import torch
import yaml

from gpt.model.transformer import ModelConfig
from gpt.schedule import BatchConfig, RampUpConfig, ScheduleConfig
from parallel.errors import ConfigError
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.engine import ZeroConfig
from zero.offload.placement import OffloadConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ParallelSettings:
    """How the ranks are laid out; those that are left after the tensor axis form the data axis."""

    tensor_size: int = 1
    """Ranks that share one copy of the model, within a node."""
    sequence_parallel: bool = False
    """Split norms, dropout and residuals along the tokens over the tensor ranks, instead of repeating them."""
    shard_size: int | None = None
    """Data-parallel ranks that divide the model states among them, replicas beyond: null for all ranks."""
    tensor_across_nodes: bool = False
    """Allow a tensor group to span nodes, as the paper's baseline does; its links are many times slower."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW: weight decay on matrices and embeddings only, gradients clipped by their global norm."""

    lr: float = 3e-4
    """Highest learning rate; `schedule` says how it is reached and left."""
    weight_decay: float = 0.1
    """Decoupled weight decay of parameters with two or more dimensions."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down to it; .inf for never."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        if self.lr < 0 or self.weight_decay < 0:
            raise ConfigError(f"optimizer.lr={self.lr} and weight_decay={self.weight_decay} must be 0 or more")
        if self.clip_norm <= 0:
            raise ConfigError(
                f"optimizer.clip_norm={self.clip_norm} is not above 0; choose 1.0, or .inf for no clipping"
            )


@dataclass(frozen=True)
class LossScaleSettings:
    """fp16 only: the factor on the loss that keeps small gradients from vanishing."""

    dynamic: bool = True
    """Halve the scale when gradients overflow and double it when they have not for long; false: it stays."""
    initial: float = 65536.0
    """Scale at the first step."""
    minimum: float = 1.0
    """Scale that is not halved any more."""
    growth_interval: int = 1000
    """Good steps in a row after which the scale doubles."""
    hysteresis: int = 2
    """Overflows in a row before the scale is halved."""

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.initial:
            raise ConfigError(
                f"train.loss_scale.minimum={self.minimum} must be above 0 and not above initial={self.initial}; "
                "choose 1 and 65536"
            )
        for name in ("growth_interval", "hysteresis"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.loss_scale.{name}={getattr(self, name)} is below 1; choose 1 or more")


@dataclass(frozen=True)
class TrainSettings:
    """What is done, how long, and with how much at a time."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    micro_batch_size: int = 4
    """Sequences that one rank runs at once."""
    global_batch_size: int = 8
    """Sequences a step over all ranks; more than fit at once are accumulated."""
    ramp_up: RampUpConfig | None = None
    """Grow to global_batch_size from a smaller batch; null: start with it."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of parameters, activations and gradients; master weights and moments are fp32."""
    loss_scale: LossScaleSettings = field(default_factory=LossScaleSettings)
    """The dynamic loss scale of fp16."""
    initial_weights: str | None = None
    """Folder of GPT-2 weights, as transformers writes them, that a run starts from; null: random values."""
    seed: int = 1234
    """Initial values, dropout and the order of samples follow from it."""
    log_every: int = 10
    """Steps between lines in the console and in metrics.jsonl. Logging waits for the device."""
    layer_norms_every: int = 0
    """Steps between gradient norms of every layer, in logged steps; 0: never."""
    eval_every: int = 0
    """Steps between evaluations on the validation split; 0: only at the end."""
    eval_samples: int = 64
    """Sequences of the validation split that an evaluation reads, rounded up to whole micro-batches; 0: none at all."""
    peak_tflops: float | None = None
    """Peak of one device in this precision, for MFU; null: from a table of known GPUs."""
    sample_tokens: int = 64
    """Tokens that the model writes at the end for each prompt; 0: none."""
    prompts: tuple[str, ...] = ("def", "import", "class")
    """Beginnings of the texts that the model writes at the end."""

    def __post_init__(self) -> None:
        for name in ("steps", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name}={getattr(self, name)} is below 1; choose 1 or more")
        for name in ("layer_norms_every", "eval_every", "eval_samples", "sample_tokens", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"train.{name}={getattr(self, name)} is below 0; choose 0 or more")
        if self.precision not in DTYPES:
            raise ConfigError(f"train.precision={self.precision} is unknown; choose {', '.join(DTYPES)}")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def batch(self) -> BatchConfig:
        return BatchConfig(self.micro_batch_size, self.global_batch_size, self.ramp_up)


@dataclass(frozen=True)
class DataSettings:
    """Prepared token files (`python -m data.prepare`)."""

    path: str | list[str]
    """PREFIX of a .bin/.idx pair, or a list of WEIGHT:PREFIX to blend."""
    split: tuple[float, float, float] = (0.98, 0.01, 0.01)
    """Shares of the documents for training, validation and test."""
    cache_dir: str | None = None
    """Where sample indices are kept; null: beside the data."""


@dataclass(frozen=True)
class CheckpointSettings:
    """Saving what a run needs to go on, under run.dir/checkpoints."""

    every: int = 0
    """Steps between checkpoints, and one at the end; 0: only where a signal ends the run early."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    asynchronous: bool = True
    """Copy to host memory and write behind the training; false: wait for the disk, without the copy."""
    weights: bool = False
    """Also leave the weights in run.dir/weights, in train.precision, as transformers reads them."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint of run.dir, if any; never: start anew; or a checkpoint's folder."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise ConfigError(
                f"checkpoint.every={self.every} must be 0 or more and checkpoint.keep={self.keep} 1 or more"
            )


@dataclass(frozen=True)
class GuardSettings:
    """What is done about losses that are not finite, or spikes, and about replicas that differ."""

    policy: Literal["skip", "stop", "roll_back"] = "skip"
    """A bad step updates nothing; then go on, or stop, or go back to the newest checkpoint and leave those samples out.
    fp16 overflows are no bad losses."""
    spike_factor: float | None = None
    """A loss above so many times the running mean is bad; null: only losses that are not finite are."""
    max_roll_backs: int = 3
    """Times that a run goes back before it stops."""
    check_replicas_every: int = 0
    """Steps between comparisons of what replicas hold, by checksum; 0: never. Waits for the device."""

    def __post_init__(self) -> None:
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise ConfigError(f"guard.spike_factor={self.spike_factor} is not above 1; choose 3, or null for none")
        for name in ("max_roll_backs", "check_replicas_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"guard.{name}={getattr(self, name)} is below 0; choose 0 or more")

    @property
    def judges(self) -> bool:
        """Whether the loss has to be looked at: a non-finite gradient is skipped without."""
        return self.policy != "skip" or self.spike_factor is not None


@dataclass(frozen=True)
class RunSettings:
    """Where a run leaves what it makes."""

    dir: str = "runs/default"
    """Folder of config.yaml, metrics.jsonl, loss.png and checkpoints."""
    hang_seconds: float = 600.0
    """Time without progress on any rank after which the one that holds up the others is named and the job ends; 0:
    never."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, in run.dir/tensorboard."""

    def __post_init__(self) -> None:
        if self.hang_seconds < 0:
            raise ConfigError(f"run.hang_seconds={self.hang_seconds} is below 0; choose 600, or 0 for no watch")
        if self.tensorboard and find_spec("tensorboard") is None:
            raise ConfigError("run.tensorboard=true needs a package; pip install tensorboard, or choose false")


@dataclass(frozen=True)
class ProfileSettings:
    """A look at where the time of a few steps goes."""

    steps: tuple[int, int] | None = None
    """First and last step that are timed and traced; null: none."""
    ranks: tuple[int, ...] = (0,)
    """Ranks whose trace is written, to run.dir/profile/rank-*.json; all ranks are timed."""
    collectives_step: int = 5
    """Step whose collectives the first rank counts in run.dir/collectives.json, to be compared with a dry run's or
    another run's; it is slower than others. 0: none."""

    def __post_init__(self) -> None:
        if self.collectives_step < 0:
            raise ConfigError(f"profile.collectives_step={self.collectives_step} is below 0; choose 5, or 0 for none")
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise ConfigError(f"profile.steps={list(self.steps)} are no first and last step; choose [10, 12]")


@dataclass(frozen=True)
class DryRunSettings:
    """Two steps of one rank of a world that does not exist, to see what a run needs and how fast it will be."""

    world_size: int | None = None
    """Ranks of the imitated run; null: no dry run."""
    rank: int = 0
    """The one that runs."""
    cluster: str | None = None
    """File of the machine, such as configs/clusters/dgx-2.yaml; null: one large node, no projection of time."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Whose buffers are imitated: gloo needs some to receive in."""
    trace: str | None = None
    """File for the projected timeline, to open in Perfetto or chrome://tracing; needs a cluster."""

    def __post_init__(self) -> None:
        if self.world_size is not None and self.world_size < 1:
            raise ConfigError(f"dry_run.world_size={self.world_size} is below 1; choose 1 or more, or null")
        if self.backend not in ("nccl", "gloo"):
            raise ConfigError(f"dry_run.backend={self.backend} is unknown; choose nccl or gloo")
        if self.trace and not self.cluster:
            raise ConfigError(
                f"dry_run.trace={self.trace} needs times; set dry_run.cluster=configs/clusters/dgx-2.yaml"
            )


@dataclass(frozen=True)
class WandbSettings:
    """Weights & Biases."""

    mode: Literal["online", "offline", "disabled"] = "disabled"
    """online needs an API key in the environment; offline writes under run.dir, to be synced later."""
    project: str = "zero-gpt"
    """Project that the run appears in."""
    name: str | None = None
    """Name of the run; null: the last part of run.dir."""
    group: str | None = None
    """Runs that are shown together, such as those of one experiment."""
    tags: tuple[str, ...] = ()
    """Words to find the run by."""


@dataclass(frozen=True)
class Settings:
    """GPT pretraining with ZeRO. Every option may stand in a YAML file, and on the command line after it."""

    model: ModelConfig
    data: DataSettings
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainSettings = field(default_factory=TrainSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    run: RunSettings = field(default_factory=RunSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    dry_run: DryRunSettings = field(default_factory=DryRunSettings)

    def to_yaml(self) -> str:
        """A file that `--config` reads back as the same settings."""
        return yaml.safe_dump(_plain(self), sort_keys=False)


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries and tuples as lists, for YAML."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
