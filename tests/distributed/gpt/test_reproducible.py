"""`train.reproducible=layout`: training has the same bits on any number of data-parallel ranks, in each layout."""

import hashlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batches import BatchLoader
from data.documents import joined_apart
from gpt.builder.train_state import TrainState, build, num_adding_units
from gpt.checkpoint.checkpoint import RunSaver, load
from gpt.checkpoint.folder import Kept
from gpt.checkpoint.layout import Progress
from gpt.settings.parser import parse_settings
from gpt.settings.schedule import batch_plan
from gpt.settings.settings import Settings
from gpt.settings.training import check_evaluated
from gpt.train_step import evaluate, train_step
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from tests.ranks import run_cases, run_ranks

CPU = torch.device("cpu")
GPT2 = ("--model.num_layers=2", "--model.hidden_size=24", "--model.num_heads=2", "--model.vocab_size=83")
LLAMA = (
    *GPT2,
    "--model.norm=rms",
    "--model.mlp=swiglu",
    "--model.positions=rope",
    "--model.num_kv_heads=1",
    "--model.biases=false",
    "--model.tied_head=false",
)
S0, S1, S2, S3 = (f"--zero.stage={stage}" for stage in range(4))
SMALL, LOCAL, GROUPS = "--zero.bucket_numel=4000", "--zero.accumulate=local", "--parallel.shard_size=2"
CODES = "--zero.gather_dtype=fp8"
CONTEXT = "--parallel.context_size=2"
SEQUENCE = "--parallel.sequence_parallel=true"
BASE = (
    "--data.path=unread",
    "--model.seq_length=10",
    "--model.dropout=0.1",
    "--train.reproducible=layout",
    "--train.reproducible_blocks=4",
    "--train.micro_batch_size=1",
    "--train.global_batch_size=12",
    "--train.eval_samples=12",
    "--optimizer.clip_norm=0.5",
    "--optimizer.lr=0.01",
)


class Trained(NamedTuple):
    """The figures and the states of one rank after some steps."""

    figures: list[float]  # losses and norms of each step
    ends: list[float]  # norms of layers in the last step, and the validation loss
    pieces: dict[tuple[str, str, int], Tensor]  # (parameter, state, first element)


class RandomSamples:
    """Sequences whose tokens are a function of their number."""

    def __init__(self, settings: Settings):
        self._model, self._masks_documents = settings.model, settings.data.mask_documents

    def __getitem__(self, number: int) -> np.ndarray:
        tokens = np.random.default_rng(number).integers(self._model.vocab_size, size=self._model.seq_length + 1)
        if not self._masks_documents:
            return tokens
        cut = 1 + number % 8
        return joined_apart([tokens[:cut], tokens[cut:]])


def pieces_of(state: TrainState) -> dict[tuple[str, str, int], Tensor]:
    found = {}
    for bucket in state.optimizer.buckets:
        for piece in state.optimizer.pieces_of(bucket):
            states = {"master": piece.param.detach(), **state.optimizer.states_of(piece)}
            for kind, value in states.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    found[piece.name, kind, piece.in_param.start] = value.clone()
    return found


def build_with_loader(settings: Settings) -> tuple[TrainState, BatchLoader]:
    """Return what a step changes, and a reader of random samples."""
    mesh = Mesh.create(
        settings.parallel.tensor_size,
        shard_size=settings.parallel.shard_size,
        context_size=settings.parallel.context_size,
    )
    loader = BatchLoader(
        RandomSamples(settings),
        micro_batch_size=settings.train.micro_batch_size,
        data_rank=mesh.batch_rank,
        data_size=mesh.num_batch_ranks,
        vocab_size=settings.model.vocab_size,
        num_units=num_adding_units(settings, mesh),
    )
    return build(settings, mesh, CPU), loader


def train(options: tuple[str, ...], num_steps: int, source: Path | None = None, target: Path | None = None) -> Trained:
    """Train up to step `num_steps`, from a checkpoint if there is one; write another one."""
    settings = parse_settings([*BASE, *options])
    state, loader = build_with_loader(settings)
    mesh = state.mesh
    figures, layers = [], {}
    assert state.leaves is not None
    progress = Progress() if source is None else load(source, state)
    plan = list(itertools.islice(batch_plan(settings.train, progress.consumed_samples), num_steps - progress.step))
    for step, batches in enumerate(loader.steps(plan), progress.step):
        leaves = replace(state.leaves, step=step)

        def read_layers(step: int = step) -> None:
            if step == num_steps - 1:
                layers.update(state.optimizer.grad_norm.by_layer(state.model.module))

        found = train_step(state.model, state.optimizer, batches, mesh, state.guard, read_layers, leaves)
        figures += [value.item() for value in found]
    (validation,) = loader.steps([(10**6, settings.train.eval_samples)])
    ends = [norm.item() for norm in layers.values()]
    ends.append(evaluate(state.model, validation, mesh, state.leaves))
    if target is not None:
        saver = RunSaver(target, state, kept=Kept(1), is_async=False)
        saver.start(Progress(num_steps, sum(plan[-1])))
        saver.wait()
    return Trained(figures, ends, pieces_of(state))


def hash_of(of_ranks: list[Trained]) -> str:
    """Return a hash of what the ranks have together."""
    for other in of_ranks[1:]:
        assert other[:2] == of_ranks[0][:2]
    pieces: dict[tuple[str, str, int], Tensor] = {}
    for rank in of_ranks:
        pieces |= rank.pieces
    digest = hashlib.sha256(torch.tensor(of_ranks[0].figures + of_ranks[0].ends, dtype=torch.float64).numpy().tobytes())
    wholes: dict[str, list[Tensor]] = {}
    for (name, kind, _), value in sorted(pieces.items(), key=lambda item: item[0]):
        wholes.setdefault(f"{name} {kind}", []).append(value)
    for name, values in wholes.items():
        digest.update(name.encode())
        digest.update(torch.cat(values).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_after(num_ranks: int, *options: str, num_steps: int = 2) -> str:
    return hash_of(run_ranks(num_ranks, train, options, num_steps))


LAYOUTS = [  # ranks, options
    (2, (S0,)),
    (3, (S3, SMALL, "--offload.mode=host")),
    (4, (S2, "--zero.overlap=false", "--zero.reduce_dtype=fp32")),
    (4, (S1, SMALL)),
    (4, (S3, SMALL, GROUPS)),
    (2, (S1, "--offload.mode=host")),
    (4, (S3, SMALL, "--zero.defragment=true")),
    (4, (S1, GROUPS)),
    (3, (S2, SMALL)),
    (4, (S2, GROUPS, "--zero.optimizer_over=all", "--offload.mode=host")),
    (4, (S3, SMALL, LOCAL)),
    (4, (S2, LOCAL, GROUPS, "--zero.optimizer_over=all")),
]
PER_HEAD = ("--optimizer.muon.per_head=true", "--optimizer.cautious_decay=true")
TRAININGS = {
    "gpt2": GPT2,
    # In fp32: a sum of a few gradients in half precision is often exact in any order.
    "llama": (*LLAMA, "--train.precision=fp32"),
    "fp16": (*LLAMA, "--train.precision=fp16", "--train.loss_scale.growth_interval=1", "--optimizer.name=adamw_bf16"),
    "8 bits": (*LLAMA, "--optimizer.name=adamw8bit", "--train.precision=fp32"),
    "muon": (*GPT2, "--optimizer.name=muon", "--guard.spike_factor=1.001", *PER_HEAD),
    "soap": (*GPT2, "--optimizer.name=soap"),
    "fp8": (*LLAMA, "--train.matmul=fp8", "--train.fp8.keep_last=1"),
    # 128 x 128 blocks that rows of 136 cross
    "fp8 blocks": (*LLAMA, "--train.matmul=fp8", "--train.fp8.recipe=blockwise", "--model.hidden_size=136"),
}
IN_FP8 = {"fp8": (CODES,), "fp8 blocks": (CODES, "--zero.bucket_numel=40000")}  # of every layout
BY_DEFAULT = ["muon", "llama", "fp16", "fp8 blocks"]


@pytest.mark.parametrize(
    ("training", "takes_all"),
    [
        *((training, False) for training in BY_DEFAULT),
        *(pytest.param(training, True, marks=pytest.mark.full) for training in TRAININGS),
    ],
)
def test_every_training_has_the_same_bits_in_each_layout(training, takes_all):
    """The layouts take turns; each is compared with one rank. In FP8 weights are gathered in FP8 too."""
    options = TRAININGS[training]
    codes = IN_FP8.get(training, ())
    if takes_all:
        layouts = [(1, (S3, "--zero.overlap=false")), *LAYOUTS]
    else:
        layouts = LAYOUTS[BY_DEFAULT.index(training) :: len(TRAININGS)]
    first = hash_after(1, *options, S1)
    for ranks, layout in layouts:
        assert hash_after(ranks, *options, *layout, *codes) == first, layout


def test_a_run_that_goes_on_with_fewer_ranks_has_the_bits_of_the_undisturbed_one(tmp_path):
    ramp = "--train.ramp_up.start=12", "--train.ramp_up.increment=12", "--train.ramp_up.samples=24"
    options = (*LLAMA, *ramp, "--train.global_batch_size=24", "--train.precision=fp16")
    figures, source = list[float](), None
    for ranks, layout, last in [(4, (S1,), 2), (3, (S3, SMALL), 4), (1, (S2,), 5)]:
        of_ranks = run_ranks(ranks, train, (*options, *layout), last, source, tmp_path)
        figures += of_ranks[0].figures
        source = tmp_path / f"step-{last:08d}"
    whole = run_ranks(2, train, (*options, S3), 5)
    assert figures == whole[0].figures
    assert hash_of([Trained(figures, *rank[1:]) for rank in of_ranks]) == hash_of(whole)


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        (("--parallel.tensor_size=2", SEQUENCE), [(2, (S2,)), (4, (S3,))]),
        pytest.param((CONTEXT,), [(2, (S2,)), (4, (S3, SMALL))], marks=pytest.mark.full),
        # Gradients of each part of a sequence are kept, and their sums are added last: a hash of its own.
        ((CONTEXT, "--train.reproducible_blocks=2"), [(2, (S1, SMALL)), (4, (S0,)), (4, (S3, LOCAL))]),
        pytest.param(
            (CONTEXT, "--train.reproducible_blocks=3"),
            [(2, (S2, LOCAL, "--offload.mode=host")), (6, (S1,))],
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_tensor_or_context_axis_of_one_size_keeps_the_bits(options, layouts):
    first, *others = (hash_after(ranks, *GPT2, *options, *layout) for ranks, layout in layouts)
    assert others == [first] * len(others)


REFUSED = {
    (S1, "--train.reproducible_blocks=1"): "leaf_blocks=1 .* over 3 ranks or groups.*choose 3",
    (S2, LOCAL): "leaf_blocks=4 .* over 3 ranks or groups.*choose 6",
    ("--parallel.shard_size=1", "--train.reproducible_blocks=5"): "over 3 .*choose 6",
    (S1, "--zero.reduce_dtype=bf16", "--train.reproducible_blocks=3"): "reduce_dtype=bf16 rounds",
}


def check_refused(options: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        train((*GPT2, *options), 1)


def test_layouts_that_would_add_in_another_order_are_refused():
    run_cases(3, check_refused, [*REFUSED.items()])


def test_settings_that_the_number_of_ranks_would_change_are_refused():
    settings = parse_settings([*BASE, *GPT2]).train
    check_evaluated(settings, 3)
    with pytest.raises(ConfigError, match=r"eval_samples=12 .* multiple of 8"):
        check_evaluated(settings, 8)
    check_evaluated(replace(settings, reproducible="run"), 8)
    with pytest.raises(ConfigError, match=r"reproducible_blocks=16 is above the 12 micro-batches"):
        parse_settings([*BASE, *GPT2, "--train.reproducible_blocks=16"])
