"""Compiled blocks against blocks that are not compiled: the same bits, the same traffic, as few graphs as possible."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.builder.train_state import build_model
from gpt.model.compiled_blocks import compile_blocks
from gpt.model.transformer import initialize
from gpt.shape.config import ModelConfig
from parallel.mesh import Mesh
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens
from tests.distributed.zero.compiled.backend import Backend
from tests.pairwise import noting
from tests.ranks import run_ranks
from tests.unit.gpt.model.models import VARIANTS
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.data_parallel import ZeroDataParallel
from zero.fp8 import convert
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

CPU = torch.device("cpu")
TENSOR_LAYOUTS = [(1, False), (2, False), (2, True)]  # (tensor size, sequence parallel)


@dataclass(frozen=True)
class Case:
    stage: int = 3
    store: str = "none"
    tensor_size: int = 1
    sequence_parallel: bool = False
    dropout: float = 0.0
    attention: str = "flash"
    num_layers: int = 3
    bucket_numel: int = 1500
    variant: str = ""  # of VARIANTS; without it, GPT-2
    multiplies_in_fp8: bool = False

    @property
    def model(self) -> ModelConfig:
        if self.variant:
            return VARIANTS[self.variant]
        return ModelConfig(self.num_layers, 16, 2, 8, 50, self.dropout, vocab_multiple=2, attention=self.attention)

    @property
    def num_graphs(self) -> int:
        """One, or two around attention that draws random numbers of its own on each tensor rank."""
        return 1 if self.tensor_size == 1 or self.dropout == 0 else 2


@dataclass(frozen=True)
class Outcome:
    """The numbers that a rank has computed, and the collectives that it has launched.

    Their order is not compared: a compiled block writes its gradients at once, after the collectives of its layers.
    """

    values: dict[str, Tensor]
    traffic: Counter[tuple[Any, ...]]


def train(case: Case, backend: Callable[..., Any] | str | None) -> Outcome:
    """Train for two steps of two micro-batches, and evaluate."""
    torch.manual_seed(0)
    mesh = Mesh.create(case.tensor_size)
    tokens = (SplitTokens if case.sequence_parallel else ReplicatedTokens)(mesh.tensor)
    activations = ActivationsConfig(case.store)
    gpt = build_model(case.model, activations, tokens, CPU, torch.float64, is_compiled=backend is not None)
    initialize(gpt, seed=0)
    if case.multiplies_in_fp8:
        convert(gpt)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(case.stage, case.bucket_numel, overlap_gather=True))
    if backend is not None:
        compile_blocks(gpt, activations.recomputes, backend)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, tensor=mesh.tensor, lr=0.01)
    torch.manual_seed(1 + mesh.data.rank)
    values = {}
    with mesh.log.keeping_events(lambda: 0) as events:
        for step in range(2):
            with model.accumulate():
                values[f"loss {2 * step}"] = backward(model, 2 * step, mesh.data.rank)
            values[f"loss {2 * step + 1}"] = backward(model, 2 * step + 1, mesh.data.rank)
            values[f"norm {step}"] = optimizer.step()
        gpt.eval()
        with torch.no_grad():
            values["logits"] = model(torch.arange(5)[None])
    with model.gathered():
        values |= {name: param.detach().clone() for name, param in gpt.named_parameters()}
    return Outcome(values, Counter((event.op, event.axis, event.message_bytes, event.dtype) for event in events))


def backward(model: ZeroDataParallel, number: int, rank: int) -> Tensor:
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(100 * number + rank))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach()


def check_equals_eager(cases: list[Case], backend_name: str) -> None:
    for case in cases:
        backend = Backend(backend_name)
        with noting(case):
            expected, found = train(case, None), train(case, backend)
            # An RMSNorm that is compiled is torch's, which rounds in another place.
            tolerance = 1e-12 if case.variant else 0.0
            torch.testing.assert_close(found.values, expected.values, rtol=tolerance, atol=tolerance)
            assert found.traffic == expected.traffic
            assert expected.traffic
            # The same for all blocks, micro-batches and steps.
            assert len(backend.num_operations) == case.num_graphs, backend.num_operations


FEW = {
    # In one bucket the embedding waits for the updates of all blocks.
    1: [
        Case(stage=1, store="keep", dropout=0.1, bucket_numel=10**6),
        Case(store="selective", dropout=0.1, num_layers=4),
    ],
    2: [
        Case(store="keep", tensor_size=2, variant="mistral"),
        Case(0, tensor_size=2, sequence_parallel=True, dropout=0.1, num_layers=4, multiplies_in_fp8=True),
    ],
}


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_compiled_blocks_equal_eager_ones(tensor_size: int):
    run_ranks(2, check_equals_eager, FEW[tensor_size], "aot_eager_default_partitioner")


@pytest.mark.full
@pytest.mark.parametrize(("tensor_size", "sequence_parallel"), TENSOR_LAYOUTS)
def test_compiled_blocks_of_all_variants_equal_eager_ones(tensor_size: int, sequence_parallel: bool):
    cases = [Case(3, "keep", tensor_size, sequence_parallel, variant=name) for name in VARIANTS]
    run_ranks(2, check_equals_eager, cases, "aot_eager_default_partitioner", timeout_seconds=1800)


def check_inductor() -> None:
    """Fused kernels add up in another order."""
    expected, found = train(Case(), None), train(Case(), "inductor")
    torch.testing.assert_close(found.values, expected.values, rtol=1e-6, atol=1e-6)
    assert found.traffic == expected.traffic


@pytest.mark.full
def test_blocks_that_inductor_compiles_equal_eager_ones():
    run_ranks(2, check_inductor)
