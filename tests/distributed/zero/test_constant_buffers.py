"""C_B: the temporary memory of a step does not grow with the number of layers, and one setting bounds it."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from gpt.builder.train_state import build_model
from gpt.model.transformer import initialize
from gpt.shape.config import ModelConfig
from lab.observe.memory_tracker import MemoryTracker
from parallel.mesh import Axis, Mesh
from parallel.tensor import softmax
from parallel.tensor.linear_cross_entropy import linear_cross_entropy, temporary_bytes
from parallel.tensor.token_layout import ReplicatedTokens
from tests.ranks import run_cases
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.checkpoint import resident
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TemporaryBytes:
    """Bytes above those at rest, at the peaks of forward and backward and of the update; and constant buffers."""

    in_passes: int
    in_update: int
    constant: int

    @property
    def total(self) -> int:
        return self.in_passes + self.in_update + self.constant


def measure(num_layers: int, stage: int, store: str, bucket_numel: int | None) -> TemporaryBytes:
    mesh = Mesh.create(tensor_size=1)
    config = ModelConfig(num_layers, 32, 4, seq_length=16, vocab_size=97, dropout=0.0)
    tokens = ReplicatedTokens(mesh.tensor)
    gpt = build_model(config, ActivationsConfig(store), tokens, CPU, torch.bfloat16)
    initialize(gpt, seed=0)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(stage, bucket_numel, prefetch_numel=15_000, defragment=True))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, tensor=mesh.tensor, fused=True)
    batch = torch.randint(97, (2, 17), generator=torch.Generator().manual_seed(0))

    def backward() -> None:
        model(batch[:, :-1], batch[:, 1:]).backward()

    with MemoryTracker(CPU) as tracker:
        backward()
        optimizer.step()
        tracker.restart()
        at_rest = tracker.device.total
        backward()
        in_passes = tracker.device.peak_total - at_rest
        tracker.restart()
        at_rest = tracker.device.total
        optimizer.step()
        in_update = tracker.device.peak_total - at_rest
    return TemporaryBytes(in_passes, in_update, sum(resident.buffer_bytes(model, optimizer).values()))


def test_peak_temporaries_do_not_grow_when_the_layers_double():
    bucket_numel = 2000
    rows = [(0, "keep"), (1, "partition_host"), (2, "keep"), (3, "partition_host")]
    found = run_cases(2, measure, [(layers, *row, bucket_numel) for row in rows for layers in (2, 4)])
    num_buckets = 16  # staged, received and cast, at most; a unit's last, smaller bucket is received by itself
    few_scalars = 16  # bytes that gloo still references for a moment
    for few, many in zip(itertools.chain(*found[::2]), itertools.chain(*found[1::2]), strict=True):
        assert abs(many.in_passes - few.in_passes) <= few_scalars
        assert abs(many.in_update - few.in_update) <= few_scalars
        assert max(few.constant, many.constant) <= num_buckets * bucket_numel * 2


def test_without_constant_buffers_peak_temporaries_grow():
    """The setting is there to prevent this; the test above can fail."""
    (four, *_), (eight, *_) = run_cases(2, measure, [(n, 2, "keep", None) for n in (4, 8)])
    assert eight.total > 1.5 * four.total


@pytest.mark.parametrize(("chunk_tokens", "rows_numel"), [(64, 10**6), (64, 1000), (16, 1000), (1, 1000)])
def test_the_loss_allocates_the_bytes_that_it_promises(chunk_tokens, rows_numel, monkeypatch):
    """Logits of a chunk, their copies in fp32 and the weight's gradient, beside gradients of x and some vectors."""
    monkeypatch.setattr(softmax, "ROWS_NUMEL", rows_numel)
    num_tokens, num_words, features = 64, 128, 8
    options = softmax.Softmax(chunk_tokens=chunk_tokens)
    targets = torch.randint(num_words, (num_tokens,))
    tokens = ReplicatedTokens(Axis.trivial("tensor"))
    with MemoryTracker(CPU) as tracker:
        x = torch.randn(num_tokens, features, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(num_words, features, dtype=torch.bfloat16, requires_grad=True)
        at_rest = tracker.device.total
        loss = linear_cross_entropy(x, weight, targets, num_words, tokens, softmax=options)
        in_forward = tracker.device.peak_total - at_rest - x.nbytes
        tracker.restart()
        loss.backward()
        in_backward = tracker.device.peak_total - at_rest
    promised = temporary_bytes(num_tokens, weight, options)
    num_rows = min(chunk_tokens, max(1, rows_numel // num_words))
    sums = 4 if chunk_tokens < num_tokens else 2
    assert promised == 2 * chunk_tokens * num_words + 2 * 4 * num_rows * num_words + sums * num_words * features
    few_numbers = 64 * num_tokens
    assert promised / 2 <= in_forward <= promised + few_numbers
    assert in_backward <= 2 * weight.nbytes + weight.nbytes + 2 * x.nbytes + few_numbers
