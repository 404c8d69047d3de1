"""All settings of a run: a tree of frozen dataclasses, each of which checks its values when it is made.

`gpt/settings_parser.py` reads them. The types of the fields state the ranges of their values; from these and from the
docstrings the text of `pretrain_gpt.py --help` is made.
"""

import math
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
import yaml

from gpt.schedule import BatchConfig, BatchSize, NumSteps, RampUpConfig, ScheduleConfig
from gpt.shape.config import ModelConfig
from parallel.errors import ConfigError
from parallel.fields import FilePath, NonNegative, Positive, Range, check_fields
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.config import DTYPES, DtypeName, ZeroConfig
from zero.offload.placement import OffloadConfig
from zero.optimizers.adamw8bit import BLOCK

Ranks = Annotated[int, Range(1, 2**20)]
Share = Annotated[float, Range(0, 1e9)]
BelowOne = Annotated[float, Range(0, below=1)]
LossScale = Annotated[float, Range(2.0**-32, 2.0**64)]


@dataclass(frozen=True)
class ParallelSettings:
    """The sizes of the mesh axes: tensor_size ranks share one copy of the model, and the copies form the data axis."""

    tensor_size: Ranks = 1
    """Ranks that share one copy of the model by tensor parallelism; they should be on one node."""
    sequence_parallel: bool = False
    """Split the tokens of norms, dropout and residuals over the tensor ranks, instead of repeating the work on each."""
    context_size: Ranks = 1
    """Data-parallel ranks that divide the tokens of each sequence among them. Attention exchanges heads for tokens, so
    this must divide the heads of a tensor rank; for sequences too long for the memory of one GPU."""
    shard_size: Ranks | None = None
    """Data-parallel ranks over which ZeRO shards the model states; each such group is a replica of the others. null:
    all data-parallel ranks."""
    tensor_across_nodes: bool = False
    """Allow the ranks of one tensor group to be on several nodes, as in the ZeRO paper's baseline. Links between nodes
    are many times slower."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class MuonSettings:
    """Muon, which updates the matrices inside of the blocks. Embeddings, norms and biases are updated by AdamW."""

    ns_steps: Annotated[int, Range(1, 99)] = 5
    """Steps of the Newton-Schulz iteration that makes a matrix of updates orthogonal."""
    ns_dtype: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Data type of this iteration, and of the messages by which matrices reach the ranks that compute them."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of the learning rate of a matrix. match_rms_adamw: 0.2 sqrt(max(rows, columns)), which makes updates as
    large as those of AdamW; original: sqrt(max(1, rows / columns))."""
    lr_factor: Annotated[float, Range(above=0, at_most=1e4)] = 1.0
    """Further factor of the learning rate of all matrices."""
    joins_parts: bool = True
    """Put the parts of a matrix that tensor ranks have together; false: make each part orthogonal by itself, which
    sends nothing along the tensor axis, and gives updates that depend on the tensor size."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class SoapSettings:
    """SOAP, which updates the matrices inside of the blocks. Embeddings, norms and biases are updated by AdamW."""

    shampoo_beta: BelowOne = 0.95
    """Decay rate of the preconditioners."""
    refresh_every: Positive = 10
    """Steps between two refinements of the preconditioners' eigenbases, each of which takes a QR decomposition."""
    lr_factor: Annotated[float, Range(above=0, at_most=1e4)] = 1.0
    """Factor of the learning rate of all matrices."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer; weight decay is for matrices and embeddings only, gradients are clipped by global norm."""

    lr: Annotated[float, Range(0, 1000)] = 3e-4
    """Highest learning rate of the run; the settings of `schedule` say how it rises and falls."""
    weight_decay: Annotated[float, Range(0, 1000)] = 0.1
    """Decoupled weight decay, applied to parameters with two or more dimensions."""
    clip_norm: Annotated[float, Range(above=0, allows_inf=True)] = 1.0
    """Largest global norm of the gradients; they are scaled down to it if their norm is larger. .inf: no clipping."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: Annotated[float, Range(1e-30, 1)] = 1e-8
    """Number added to the square root of the second moment, against division by zero."""
    implementation: Literal["torch", "apex"] = "torch"
    """torch: torch's fused AdamW, which never makes the host wait for the device; apex: NVIDIA apex's FusedAdam, on
    GPUs without offloaded optimizer states. A run may resume with the other one."""
    name: Literal["adamw", "adamw8bit", "muon", "soap", "sgd"] = "adamw"
    """adamw: AdamW for all parameters; adamw8bit: AdamW with moments of 8 bits, and of fp32 for norms and biases; muon:
    Muon for the matrices inside of the blocks, and AdamW for the rest; soap: SOAP and AdamW in the same way; sgd: SGD
    with momentum, with which the host waits for the device in each step."""
    momentum: BelowOne = 0.95
    """Decay rate of the momentum of muon and sgd."""
    nesterov: bool = True
    """Use Nesterov momentum in muon and sgd."""
    muon: MuonSettings = field(default_factory=MuonSettings)
    """The settings of muon."""
    soap: SoapSettings = field(default_factory=SoapSettings)
    """The settings of soap."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.implementation == "apex" and self.name != "adamw":
            raise ConfigError(
                f"OptimizerSettings.implementation=apex has AdamW only, and name={self.name}; choose "
                "implementation=torch, or name=adamw"
            )
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise ConfigError("OptimizerSettings.momentum=0.0 has no Nesterov momentum; choose nesterov=false")


@dataclass(frozen=True)
class LossScaleSettings:
    """The factor on the loss that keeps small gradients from becoming zero in fp16. Other precisions do not use it."""

    dynamic: bool = True
    """Halve the scale when gradients overflow, and double it after growth_interval steps without overflow; false: keep
    the initial scale."""
    initial: LossScale = 65536.0
    """Scale of the first step."""
    minimum: LossScale = 1.0
    """Smallest scale, below which overflows do not halve it."""
    growth_interval: Positive = 1000
    """Consecutive steps without overflow after which the scale is doubled."""
    hysteresis: Positive = 2
    """Consecutive steps with overflow after which the scale is halved."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.minimum > self.initial:
            raise ConfigError(
                f"LossScaleSettings.minimum={self.minimum} is above initial={self.initial}; choose 1 and 65536"
            )


@dataclass(frozen=True)
class TrainSettings:
    """The length of the run, its batches, its precision, and what is logged and evaluated."""

    steps: NumSteps = 1000
    """Optimizer steps of the whole run, those before a resume included."""
    micro_batch_size: BatchSize = 4
    """Sequences in one forward and backward pass of one rank."""
    global_batch_size: BatchSize = 8
    """Sequences in one optimizer step, over all ranks. If they are more than one micro-batch per data-parallel rank,
    gradients are accumulated over several micro-batches."""
    ramp_up: RampUpConfig | None = None
    """Start with a smaller batch and grow to global_batch_size; null: use global_batch_size from the first step on."""
    precision: DtypeName = "bf16"
    """Data type of parameters, activations and gradients. Master weights and the optimizer's moments are fp32."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of matrix products of fp32 tensors. highest: fp32; high: TF32 on GPUs that have it, with 10 bits of
    mantissa; medium: bf16. Products in half precision are not affected."""
    compile: Literal["none", "blocks"] = "none"
    """Part of the model that torch.compile compiles for training. blocks: all blocks have one graph, which inductor
    compiles in the first step, for about a minute; it needs triton on GPUs and g++ on CPUs. Blocks are
    not compiled in evaluation and generation."""
    loss_scale: LossScaleSettings = field(default_factory=LossScaleSettings)
    """The loss scale of fp16."""
    z_loss: Annotated[float, Range(0, 1)] = 0.0
    """Coefficient of a z-loss: the squared logarithm of each token's sum of exponentials is added to what gradients are
    computed of, so that logits do not drift (PaLM has 1e-4). The loss that is logged does not contain it."""
    initial_weights: FilePath | None = None
    """Folder of weights of GPT-2, Llama, Qwen 3 or Mistral in the format of transformers, to start the run from; null:
    random values."""
    seed: NonNegative = 1234
    """Seed of the initial values, of dropout and of the order of samples."""
    log_every: Positive = 10
    """Steps between two lines in the console and in metrics.jsonl. Logging waits for the device."""
    layer_grad_norms_every: NonNegative = 0
    """Steps between measurements of the gradient norm of each layer, which are written at logged steps; 0: never."""
    eval_every: NonNegative = 0
    """Steps between evaluations on the validation split; 0: evaluate only at the end."""
    eval_samples: Annotated[int, Range(0, 10**12)] = 64
    """Sequences of the validation split in one evaluation, rounded up to whole micro-batches; 0: never evaluate."""
    peak_tflops: Annotated[float, Range(above=0, at_most=1e9)] | None = None
    """Peak TFLOP/s of one device in this precision, from which MFU is computed; null: look it up in a table of GPUs."""
    sample_every: NonNegative = 0
    """Steps between texts that the model generates, which are logged with the step; 0: generate only at the end."""
    sample_tokens: NonNegative = 64
    """Tokens that the model generates for each prompt; 0: generate nothing."""
    prompts: tuple[str, ...] | None = None
    """Texts that the model continues; null: the first tokens of three sequences of the validation split."""

    def __post_init__(self) -> None:
        check_fields(self)

    def num_micro_batches(self, data_size: int) -> int:
        """Return the number of micro-batches of a rank in a step at full batch size."""
        return self.global_batch_size // (self.micro_batch_size * data_size)

    @property
    def compiles_blocks(self) -> bool:
        """True if blocks are compiled."""
        return self.compile == "blocks"

    @property
    def dtype(self) -> torch.dtype:
        """The data type of `precision`."""
        return DTYPES[self.precision]

    @property
    def batch(self) -> BatchConfig:
        """The sizes of the batches."""
        return BatchConfig(self.micro_batch_size, self.global_batch_size, self.ramp_up)


@dataclass(frozen=True)
class DataSettings:
    """The training data: token files written by `python -m data.prepare`."""

    path: FilePath | list[FilePath]
    """PREFIX of a pair of files PREFIX.bin and PREFIX.idx, or a list of WEIGHT:PREFIX to blend several."""
    split: tuple[Share, Share, Share] = (0.98, 0.01, 0.01)
    """Shares of the documents that are used for training, validation and test."""
    cache_dir: FilePath | None = None
    """Folder for cached indices of samples; null: the folder of the data."""
    mask_documents: bool = False
    """Keep the documents of a sample apart: attention does not cross the end of a document, positions restart, and the
    first token of the next one is not predicted."""
    packing: Literal["stream", "best_fit"] = "stream"
    """stream: samples are stretches of the joined documents; best_fit: documents are packed whole into samples, with
    padding, and only those that are longer than a sample are cut. best_fit needs data.mask_documents=true."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.packing == "best_fit" and not self.mask_documents:
            raise ConfigError(
                "DataSettings.packing=best_fit needs DataSettings.mask_documents=true, because a packed document does "
                "not continue the one before it; set it, or choose DataSettings.packing=stream"
            )


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints, which are written to run.dir/checkpoints and from which a run resumes."""

    every: NonNegative = 0
    """Steps between checkpoints, with one more at the end of the run; 0: save only if a signal ends the run early."""
    keep: Positive = 2
    """Number of checkpoints to keep; older ones are deleted."""
    asynchronous: bool = True
    """Copy the state to host memory and write it to disk while training goes on; false: training waits for the disk,
    and no copy is made."""
    weights: bool = False
    """With each checkpoint, also write the weights to run.dir/weights, in train.precision and in the format of
    transformers."""
    resume: FilePath = "auto"
    """auto: resume from the newest checkpoint in run.dir if there is one; never: start from the beginning; or the
    folder of a checkpoint to resume from."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
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

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def checks_losses(self) -> bool:
        """True if the loss of each step has to be checked; a step with a non-finite gradient is skipped in any case."""
        return self.policy != "skip" or self.spike_factor is not None


@dataclass(frozen=True)
class RunSettings:
    """The folder of the run, what is written there, and how long a run may hang."""

    dir: FilePath = "runs/default"
    """Folder to which the run writes config.yaml, metrics.jsonl, loss.png and its checkpoints."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: train on GPUs, or on CPUs if the node has no GPU; cpu: train on CPUs, also if it has GPUs."""
    hang_seconds: Annotated[float, Range(0, 1e7)] = 600.0
    """If no rank makes progress for this many seconds, the rank that holds up the others is named, each rank writes its
    last collectives to run.dir/hang, and the job ends. A collective that takes three times as long, and 10 minutes,
    fails by itself. 0: wait forever."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, to run.dir/tensorboard."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tensorboard and find_spec("tensorboard") is None:
            raise ConfigError("RunSettings.tensorboard=true needs a package; pip install tensorboard, or choose false")


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
    """A dry run: two steps of one rank of any world, on tensors without values, to see memory, traffic and time."""

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


@dataclass(frozen=True)
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

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Settings:
    """GPT pretraining with ZeRO. Every option may also be set in a YAML file; options on the command line win."""

    model: ModelConfig
    data: DataSettings
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    zero: ZeroConfig = field(default_factory=lambda: ZeroConfig(overlap_gather=True))
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

    def __post_init__(self) -> None:
        check_fields(self)
        if self.model.mup_base_width is not None and not self.optimizer.name.startswith("adamw"):
            raise ConfigError(
                f"model.mup_base_width={self.model.mup_base_width} scales learning rates for adamw and adamw8bit, and "
                f"optimizer.name={self.optimizer.name}; choose one of these, or model.mup_base_width=null"
            )

    @property
    def order_of_samples(self) -> dict[str, Any]:
        """The settings that determine which samples a step reads, by the names of their options, for JSON."""
        data = self.data
        return {
            "train.seed": self.train.seed,
            "data.split": list(data.split),
            "data.path": data.path,
            "data.packing": data.packing,
        }

    def with_alignment(self) -> "Settings":
        """Return these settings with shards that do not cut the blocks of the optimizer."""
        block_numel = BLOCK if self.optimizer.name == "adamw8bit" else 1
        return replace(self, zero=replace(self.zero, alignment=math.lcm(self.zero.alignment, block_numel)))

    def with_gradient_types(self, data_size: int) -> "Settings":
        """Return these settings with the types of gradients that null stands for on `data_size` data-parallel ranks."""
        accumulates = self.train.num_micro_batches(data_size // self.parallel.context_size) > 1
        zero = self.zero.with_gradient_types(self.train.dtype, accumulates=accumulates)
        return replace(self, zero=zero)

    def to_yaml(self) -> str:
        """Return the settings as YAML, which `--config` reads back as the same settings."""
        return yaml.safe_dump(_plain(self), sort_keys=False)


def _plain(value: Any) -> Any:
    """Return the value with dataclasses replaced by dictionaries and tuples by lists, which YAML can express."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
