"""Documents kept apart train, over the ranks of both axes, as they do one by one in one process."""

import itertools
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from data.documents import DocumentBatch, packed_apart
from gpt.builder.train_state import build_model
from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from gpt.train_step import evaluate, mean_over, train_step
from parallel.mesh import Axis, Mesh
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens, TokenLayout
from tests.ranks import run_cases
from tests.twins import params_of
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

SEQ, MICRO_BATCHES, TOLERANCE = 12, 3, 1e-10
ROUNDING = 4 * 2**-23  # relative, of the losses that an evaluation rounds to fp32
CONFIG = ModelConfig(2, 32, 4, SEQ, 61, dropout=0.0)
# Tensor size, context size, sequence parallelism, stage, store.
CASES = [
    (1, 1, False, 3, "keep"),
    (1, 2, False, 2, "selective"),
    (2, 1, False, 0, "partition"),
    (2, 1, True, 1, "none"),
]


def documents(number: int) -> list[np.ndarray]:
    """Return the documents of one sample: from one prediction in all to a sample without padding."""
    generator = np.random.default_rng(number)
    lengths = [[2], [4, 6, 5], [13], [3, 2], [7, 7], [2, 2, 2, 2], [9, 3], [5, 5, 5]][number % 8]
    return [generator.integers(0, 61, length) for length in lengths]


def micro_batch(number: int) -> list[list[np.ndarray]]:
    return [documents(2 * number), documents(2 * number + 1)]


def build(tokens: TokenLayout, store: str) -> GPT:
    torch.set_default_dtype(torch.float64)
    model = build_model(CONFIG, ActivationsConfig(store), tokens, torch.device("cpu"), torch.float64)
    initialize(model, seed=3)
    return model


class Result(NamedTuple):
    evaluated: list[float]  # the loss before each step
    losses: list[float]
    norms: list[float]
    layers: list[float]  # the norms of the norms of layers
    params: dict[str, Tensor]  # that all ranks have whole


def train(tensor_size: int, context_size: int, is_split: bool, stage: int, store: str) -> Result:
    mesh = Mesh.create(tensor_size, context_size=context_size)
    layout = (SplitTokens if is_split else ReplicatedTokens)(mesh.tensor, mesh.context)
    model = ZeroDataParallel(build(layout, store), mesh.data, ZeroConfig(stage))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, tensor=mesh.tensor, lr=1e-2, fused=True)
    result = Result([], [], [], [], {})

    def read_layers() -> None:
        norms = optimizer.grad_norm.by_layer(model.module).values()
        result.layers.append(torch.stack([*norms]).norm().item())

    for step in range(2):
        first, size = step * MICRO_BATCHES * mesh.num_batch_ranks, mesh.num_batch_ranks
        numbers = range(first + mesh.batch_rank, first + MICRO_BATCHES * size, size)
        rows = [np.stack([packed_apart(sample, SEQ) for sample in micro_batch(number)]) for number in numbers]
        batches = [DocumentBatch.of(samples) for samples in rows]
        result.evaluated.append(evaluate(model, batches, mesh))
        loss, norm = train_step(model, optimizer, batches, mesh, gradient_hook=read_layers)
        result.losses.append(mean_over(mesh, loss))
        result.norms.append(norm.item())
    return result._replace(params={name: param for name, param in params_of(model).items() if "norm" in name})


@cache
def train_one_by_one(data_size: int) -> Result:
    model = build(ReplicatedTokens(Axis.trivial("tensor")), "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(2):
        numbers = range(step * MICRO_BATCHES * data_size, (step + 1) * MICRO_BATCHES * data_size)
        of_step = list(itertools.chain.from_iterable(sample for number in numbers for sample in micro_batch(number)))
        sums = [
            model(torch.from_numpy(tokens[None, :-1]), torch.from_numpy(tokens[None, 1:])) * (len(tokens) - 1)
            for tokens in of_step
        ]
        loss = sum(sums) / sum(len(tokens) - 1 for tokens in of_step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    params = {name: param.detach() for name, param in model.named_parameters() if "norm" in name}
    return Result(losses, losses, norms, norms, params)


def test_losses_gradients_and_updates_are_those_of_the_documents_one_by_one():
    for case, results in zip(CASES, run_cases(2, train, CASES), strict=True):
        expected = train_one_by_one(2 // case[0] // case[1])
        for result in results:
            assert result.losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0), case
            for norms in (result.norms, result.layers):
                assert norms == pytest.approx(expected.norms, abs=TOLERANCE, rel=0), case
            assert result.evaluated == pytest.approx(expected.evaluated, rel=ROUNDING), case
            for name, param in result.params.items():
                torch.testing.assert_close(param, expected.params[name], rtol=0, atol=TOLERANCE)
