"""`train.reproducible=layout`: training has the same bits on any number of data-parallel ranks, in each layout."""

import hashlib
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gpt.builder.train_state import TrainState, build
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.settings.training import check_evaluated
from gpt.train_step import evaluate, train_step
from parallel.errors import ConfigError
from parallel.mesh import Mesh
from tests.ranks import RankError, run_ranks

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
S2, S3, SMALL, SEQUENCE = (
    "--zero.stage=2",
    "--zero.stage=3",
    "--zero.bucket_numel=2000",
    "--parallel.sequence_parallel=true",
)
BASE = (
    "--data.path=unread",
    "--model.seq_length=10",
    "--model.dropout=0.1",
    "--train.reproducible=layout",
    "--train.micro_batch_size=1",
    "--train.global_batch_size=12",
    "--train.eval_samples=12",
    "--optimizer.clip_norm=0.5",
    "--optimizer.lr=0.01",
)


class Trained(NamedTuple):
    """The figures and the states of one rank after some steps."""

    figures: list[float]  # losses and norms
    pieces: dict[tuple[str, str, int], Tensor]  # (parameter, state, first element)


def tokens_of(settings: Settings, first: int, mesh: Mesh) -> list[Tensor]:
    """Return this rank's micro-batches of the step that begins at sample `first`, in the order of `BatchLoader`."""
    size = settings.train.micro_batch_size
    generator = torch.Generator().manual_seed(first)
    shape = settings.train.global_batch_size // size, size, settings.model.seq_length + 1
    batches = torch.randint(settings.model.vocab_size, shape, generator=generator)
    return list(batches[mesh.batch_rank :: mesh.num_batch_ranks])


def pieces_of(state: TrainState) -> dict[tuple[str, str, int], Tensor]:
    found = {}
    for bucket in state.optimizer.buckets:
        for piece in state.optimizer.pieces_of(bucket):
            states = {"master": piece.param.detach(), **state.optimizer.inner.state.get(piece.param, {})}
            for kind, value in states.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    found[piece.name, kind, piece.in_param.start] = value.clone()
    return found


def train(options: tuple[str, ...], num_steps: int) -> Trained:
    settings = parse_settings([*BASE, *options])
    mesh = Mesh.create(
        settings.parallel.tensor_size,
        shard_size=settings.parallel.shard_size,
        context_size=settings.parallel.context_size,
    )
    state = build(settings, mesh, CPU)
    figures, layers = [], {}
    assert state.leaves is not None
    for step in range(num_steps):
        batches = tokens_of(settings, step * settings.train.global_batch_size, mesh)
        leaves = replace(state.leaves, step=step)

        def read_layers(step: int = step) -> None:
            if step == num_steps - 1:
                layers.update(state.optimizer.grad_norm.by_layer(state.model.module))

        found = train_step(state.model, state.optimizer, batches, mesh, state.guard, read_layers, leaves)
        figures += [value.item() for value in found]
    figures += [norm.item() for norm in layers.values()]
    figures.append(evaluate(state.model, tokens_of(settings, 10**6, mesh), mesh, state.leaves))
    return Trained(figures, pieces_of(state))


def hash_of(of_ranks: list[Trained]) -> str:
    """Return a hash of what the ranks have together."""
    for other in of_ranks[1:]:
        assert other.figures == of_ranks[0].figures
    pieces: dict[tuple[str, str, int], Tensor] = {}
    for rank in of_ranks:
        pieces |= rank.pieces
    digest = hashlib.sha256(torch.tensor(of_ranks[0].figures, dtype=torch.float64).numpy().tobytes())
    wholes: dict[str, list[Tensor]] = {}
    for (name, kind, _), value in sorted(pieces.items(), key=lambda item: item[0]):
        wholes.setdefault(f"{name} {kind}", []).append(value)
    for name, values in wholes.items():
        digest.update(name.encode())
        digest.update(torch.cat(values).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_after(num_ranks: int, *options: str, num_steps: int = 4) -> str:
    return hash_of(run_ranks(num_ranks, train, options, num_steps))


LAYOUTS = [  # ranks, options
    (1, ("--zero.stage=0",)),
    (1, ("--zero.stage=3", "--zero.overlap=false")),
    (2, ("--zero.stage=2", SMALL)),
    (3, ("--zero.stage=3", SMALL, "--offload.mode=host")),
    (4, ("--zero.stage=2", "--zero.overlap=false", "--zero.reduce_dtype=fp32")),
    (4, ("--zero.stage=3", SMALL, "--zero.defragment=true")),
]
TRAININGS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "fp16": (*LLAMA, "--train.precision=fp16", "--train.loss_scale.growth_interval=2"),
    "8 bits": (*LLAMA, "--optimizer.name=adamw8bit", "--train.precision=fp32"),
    "muon": (*GPT2, "--optimizer.name=muon", "--guard.spike_factor=1.001"),
    "soap": (*GPT2, "--optimizer.name=soap"),
}


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_forty_steps_have_the_same_bits_on_any_number_of_ranks(model):
    first, *others = (hash_after(ranks, *model, *options, num_steps=40) for ranks, options in (LAYOUTS[0], LAYOUTS[5]))
    assert others == [first] * len(others)


@pytest.mark.parametrize("training", TRAININGS)
def test_every_training_has_the_same_bits_in_each_layout(training):
    """The layouts take turns: each is compared with one rank."""
    number = [*TRAININGS].index(training)
    layouts = [LAYOUTS[1], LAYOUTS[2 + number % 4], LAYOUTS[2 + (number + 1) % 4]]
    first, *others = (hash_after(ranks, *TRAININGS[training], *options) for ranks, options in layouts)
    assert others == [first] * len(others)


@pytest.mark.parametrize("options", [("--parallel.tensor_size=2", SEQUENCE), ("--parallel.context_size=2",)])
def test_a_tensor_or_context_axis_of_one_size_keeps_the_bits(options):
    few, many = (hash_after(ranks, *GPT2, *options, stage) for ranks, stage in ((2, S2), (4, S3)))
    assert few == many


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--zero.stage=1",), "2 ranks or groups"),
        (("--zero.accumulate=local",), "2 ranks or groups"),
        (("--parallel.shard_size=1",), "2 ranks or groups"),
    ],
)
def test_layouts_that_would_add_in_another_order_are_refused(options, named):
    with pytest.raises(RankError, match=named):
        run_ranks(2, train, (*GPT2, *options), 1)


def test_as_many_samples_are_evaluated_on_any_number_of_ranks():
    settings = parse_settings([*BASE, *GPT2]).train
    check_evaluated(settings, 3)
    with pytest.raises(ConfigError, match=r"eval_samples=12 .* multiple of 8"):
        check_evaluated(settings, 8)
    check_evaluated(replace(settings, reproducible="run"), 8)
