"""Settings of the mesh, and of the length, the batches and the precision of a run."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

import torch

from gpt.settings.data import check_names
from parallel.validation.errors import ConfigError
from parallel.validation.fields import FilePath, NonNegative, Positive, Range, Ranks, checked
from zero.core.partition.config import DTYPES, DtypeName
from zero.fp8.scaling import RecipeName

# So that the samples of a run, steps x batch size, are less than 2**63.
NumSteps = Annotated[int, Range(1, 10**12)]
BatchSize = Annotated[int, Range(1, 2**20)]
LossScale = Annotated[float, Range(2.0**-32, 2.0**64)]


@checked
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


@checked
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
        if self.minimum > self.initial:
            raise ConfigError(
                f"LossScaleSettings.minimum={self.minimum} is above initial={self.initial}; choose 1 and 65536"
            )


@checked
class Fp8Settings:
    """Products of the linear layers of blocks in FP8. Embeddings, the head and attention keep train.precision."""

    recipe: RecipeName = "tensorwise"
    """The elements that share a scale. tensorwise: a matrix; rowwise: a row along the dim of the sum; blockwise: 1 x
    128 of activations and gradients, 128 x 128 of weights (GPUs of compute capability 9.0 only). mxfp8 and nvfp4 have
    32 and 16 along the dim of the sum, and are emulated."""
    use_fast_accum: bool = False
    """Let Hopper's kernels add with fewer bits than fp32, which is faster; that of blockwise does not."""
    emulate: bool = False
    """Compute with the values that codes stand for, in fp32, slower than bf16; a GPU without the kernel is an error
    otherwise. A CPU always does."""
    keep_first: NonNegative = 0
    """The first blocks that keep train.precision."""
    keep_last: NonNegative = 0
    """The last blocks that keep train.precision."""

    def takes(self, name: str, num_blocks: int) -> bool:
        """Return whether a part of a GPT of so many blocks, such as "blocks.0.mlp.up", is in one that uses FP8."""
        return name.startswith("blocks.") and self.keep_first <= int(name.split(".")[1]) < num_blocks - self.keep_last


@checked
class RampUpConfig:
    """A batch that grows by `increment` at equal intervals over the first `samples` samples, as in Megatron-LM."""

    start: BatchSize
    """Sequences in the first batch."""
    increment: BatchSize
    """Sequences by which the batch grows each time."""
    samples: Annotated[int, Range(1, 10**18)]
    """Samples after which the batch has reached global_batch_size."""


@checked
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
    matmul: Literal["fp8"] | None = None
    """Data type of the operands of products in linear layers of blocks; null: that of train.precision. fp8 needs bf16,
    or fp32 for tests; zero.gather_dtype=fp8 then gathers the weights at half the bytes."""
    fp8: Fp8Settings = field(default_factory=Fp8Settings)
    """The products of train.matmul=fp8."""
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
    """Folder of weights of GPT-2, Llama, Qwen 2 or 3, or Mistral in the format of transformers, to start the run from;
    null: random values."""
    reproducible: Literal["run", "layout"] = "run"
    """run: the same command on as many ranks repeats its bits. layout: losses, gradient norms, parameters, optimizer
    states and checkpoints are the same bits on any number of data-parallel ranks (docs/reproducible.md), which adds
    gradients in one order, zero.sum_over_ranks=leaves, and on CPUs gives each rank one thread."""
    reproducible_blocks: Positive = 1
    """With reproducible=layout: the blocks in which the micro-batches of a step are added, which the layouts of all
    starts must have in common. 1: stages 2 and 3 without groups; else as many as the most ranks that keep full
    gradients, or the most groups of ranks, a power of two times those of each other start."""
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
    tasks: tuple[FilePath, ...] = ()
    """Files of questions in the formats of HellaSwag, ARC and LAMBADA by which the model is judged, see
    docs/training.md; the name of a task is that of its file."""
    task_every: NonNegative = 0
    """Steps between judgements by the tasks; 0: judge only at the end."""
    task_questions: Positive | None = None
    """Number of questions of each task that are asked, from the first one on; null: all."""
    peak_tflops: Annotated[float, Range(above=0, at_most=1e9)] | None = None
    """Peak TFLOP/s of one device in this precision, from which MFU is computed; null: look it up in a table of GPUs."""
    sample_every: NonNegative = 0
    """Steps between texts that the model generates, which are logged with the step; 0: generate only at the end."""
    sample_tokens: NonNegative = 64
    """Tokens that the model generates for each prompt; 0: generate nothing."""
    prompts: tuple[str, ...] | None = None
    """Texts that the model continues; null: the first tokens of three sequences of the validation split."""

    def __post_init__(self) -> None:
        check_names("TrainSettings.tasks", [Path(path).stem for path in self.tasks])
        if self.matmul == "fp8" and self.precision == "fp16":
            raise ConfigError(
                "train.matmul=fp8 does not work with train.precision=fp16; choose bf16, or fp32 for tests"
            )
        if self.ramp_up:
            self._check_ramp_up(self.ramp_up)

    def _check_ramp_up(self, ramp_up: RampUpConfig) -> None:
        growth = self.global_batch_size - ramp_up.start
        if growth < 0 or growth % ramp_up.increment:
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} is not train.ramp_up.start={ramp_up.start} "
                f"plus a multiple of train.ramp_up.increment={ramp_up.increment}; choose an increment that divides "
                "their difference"
            )

    @property
    def is_same_on_any_layout(self) -> bool:
        """True if the number of ranks must change no bit."""
        return self.reproducible == "layout"

    def samples_at_once(self, num_ranks: int) -> int:
        """Return the number of sequences in one micro-batch of each of `num_ranks` ranks that read other samples."""
        return self.micro_batch_size * num_ranks

    def num_micro_batches(self, data_size: int) -> int:
        """Return the number of micro-batches of a rank in a step at full batch size."""
        return self.global_batch_size // self.samples_at_once(data_size)

    @property
    def smallest_batch(self) -> int:
        """The number of sequences in the smallest step."""
        return min(self.global_batch_size, self.ramp_up.start if self.ramp_up else self.global_batch_size)

    @property
    def compiles_blocks(self) -> bool:
        """True if blocks are compiled."""
        return self.compile == "blocks"

    @property
    def dtype(self) -> torch.dtype:
        """The data type of `precision`."""
        return DTYPES[self.precision]


def check_evaluated(train: TrainSettings, num_ranks: int) -> None:
    """Raise ConfigError if the number of ranks would change which samples are evaluated, and must not."""
    at_once = train.samples_at_once(num_ranks)
    if train.is_same_on_any_layout and train.eval_samples % at_once:
        raise ConfigError(
            f"train.eval_samples={train.eval_samples} would be rounded up to whole micro-batches of {num_ranks} "
            f"data-parallel ranks, {at_once} samples, and train.reproducible=layout needs the same samples on any "
            f"number of ranks; choose a multiple of {at_once}"
        )
