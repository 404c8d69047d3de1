"""The cases in which two commits are compared: small runs of `configs/quickstart.yaml` on CPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

GLOBAL_BATCH, MICRO_BATCH = 48, 4
NUM_STEPS, NUM_TIMED_STEPS = 20, 60
STAGES = range(4)
BASE = (
    "--config=configs/quickstart.yaml",
    "--model.seq_length=16",  # text and vocabulary are small: most of a step is the work of the engine
    "--model.vocab_size=512",
    f"--train.micro_batch_size={MICRO_BATCH}",
    f"--train.global_batch_size={GLOBAL_BATCH}",
    f"--train.steps={NUM_STEPS}",
    "--schedule.warmup_steps=2",
    f"--train.eval_samples={GLOBAL_BATCH}",
    "--train.sample_tokens=0",
    "--train.log_every=1",
    "--checkpoint.every=1000",  # once, at the end
)
# The step of this model is nearly all work of the host.
TIMED = (
    *BASE,
    "--model.num_layers=24",
    "--model.hidden_size=32",
    "--model.num_heads=1",
    "--train.micro_batch_size=1",
    "--train.global_batch_size=2",
    f"--train.steps={NUM_TIMED_STEPS}",
    "--train.eval_samples=0",
    f"--train.log_every={NUM_TIMED_STEPS}",
    "--checkpoint.every=0",
)
FP8 = "--train.precision=bf16", "--train.matmul=fp8", "--train.fp8.recipe=blockwise", "--zero.gather_dtype=fp8"
HOST = ("--offload.mode=host",)
AUTO = (
    "--offload.mode=auto",
    "--offload.accelerator_memory_gb=0.05",
    "--offload.min_chunk_size_m=0.25",
    "--offload.hidden_dim=192",
)


@dataclass(frozen=True)
class Case:
    """A run. `num_micro_batches` are those of a step on each rank."""

    name: str
    num_ranks: int
    options: tuple[str, ...]
    num_micro_batches: int
    num_steps: int = NUM_STEPS
    counts_operations: bool = True


def _case(name: str, num_ranks: int, *options: str, tensor_size: int = 1) -> Case:
    of_rank = GLOBAL_BATCH // MICRO_BATCH // (num_ranks // tensor_size)
    return Case(name, num_ranks, (*BASE, f"--parallel.tensor_size={tensor_size}", *options), of_rank)


def compared(pattern: str = "") -> Sequence[Case]:
    """Return the cases in whose name the pattern occurs."""
    return [case for case in _all_cases() if pattern in case.name]


def _all_cases() -> Iterator[Case]:
    for stage, tensor_size, precision in product(STAGES, (1, 2), ("fp32", "bf16")):
        name = f"stage {stage}, tensor {tensor_size}, {precision}"
        options = f"--zero.stage={stage}", f"--train.precision={precision}"
        yield _case(name, 2 * tensor_size, *options, tensor_size=tensor_size)
    stage_3 = "--zero.stage=3"
    llama = "--config=configs/models/llama.yaml", "--model.num_kv_heads=2", "--optimizer.name=muon"
    yield _case("llama, muon, stage 3", 2, *llama, stage_3)
    for over in ("group", "all"):
        yield _case(f"two levels, over {over}", 4, stage_3, "--parallel.shard_size=2", f"--zero.optimizer_over={over}")
    for stage in (0, 3):
        yield _case(f"fp8 gathers, stage {stage}", 2, f"--zero.stage={stage}", *FP8)
    yield _case("offload host, stage 3", 2, stage_3, *HOST)
    yield _case("offload auto, stage 3", 2, stage_3, *AUTO)
    fixed: dict[str, tuple[str, ...]] = {"": (), ", host": HOST, ", fp8 gathers": FP8}
    for num_ranks, (what, more) in product((1, 2, 3), fixed.items()):
        yield _case(f"fixed order, {num_ranks} ranks{what}", num_ranks, stage_3, "--train.reproducible=layout", *more)


def timed() -> Sequence[Case]:
    """Return the cases whose steps are timed, on two ranks."""
    return [
        Case(f"stage {stage}", 2, (*TIMED, f"--zero.stage={stage}"), 1, NUM_TIMED_STEPS, counts_operations=False)
        for stage in STAGES
    ]
