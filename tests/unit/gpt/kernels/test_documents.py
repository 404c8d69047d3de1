"""Documents that are kept apart in a sequence: losses and gradients are those of the documents one by one."""

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor
from torch.nn import functional as F

from data.documents import DocumentBatch
from gpt.builder.train_state import build_model
from gpt.kernels.attention import describe_documents
from gpt.kernels.documents import Documents, needs_mask
from gpt.model.compiled_blocks import compile_blocks
from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from gpt.train_step import evaluate, train_step
from parallel.mesh import Mesh
from tests.distributed.zero.compiled.backend import Backend
from tests.unit.gpt.model.models import ONE_DEVICE, small_config
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

STARTS = torch.tensor([0, 1, 6, 16, 31, 32], dtype=torch.int32)  # the second sequence of 16 begins with the fourth
POSITIONS = torch.cat([torch.arange(n) for n in STARTS.diff()]).unflatten(0, (2, 16))
TOLERANCE = 1e-13


def build(config: ModelConfig, store: str = "none") -> GPT:
    model = build_model(config, ActivationsConfig(store), ONE_DEVICE, torch.device("cpu"), torch.float64)
    initialize(model, seed=1)
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (2, 2, 16), generator=torch.Generator().manual_seed(4))
    targets = tokens[1]
    targets[0, 5] = targets[1, 15] = -1  # the last tokens of documents
    return tokens[0], targets


def gradients(model: GPT, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def one_by_one(model: GPT) -> list[Tensor]:
    tokens, targets = batch()
    bounds = [slice(first, stop) for first, stop in zip(STARTS.tolist(), STARTS[1:].tolist(), strict=False)]
    pairs = [(tokens.flatten()[part][None], targets.flatten()[part][None]) for part in bounds]
    counted = [(own, words) for own, words in pairs if words.max() >= 0]
    total = sum(model(own, words) * (words >= 0).sum() for own, words in counted)
    return gradients(model, total / (targets >= 0).sum())


@pytest.mark.parametrize(
    ("attention", "num_kv_heads", "store"),
    [("flash", 3, "none"), ("flash", 1, "selective"), ("math", 3, "keep"), ("math", 1, "none"), ("flash", 3, "keep")],
)
def test_losses_and_gradients_are_those_of_the_documents_one_by_one(attention, num_kv_heads, store):
    config = small_config(attention=attention, num_kv_heads=num_kv_heads, num_layers=3)
    model = build(config, store)
    found = gradients(model, model(*batch(), documents=Documents(POSITIONS, STARTS)))
    for one, other in zip(found, one_by_one(build(config)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    assert (found[0] - model(*batch())).abs() > 1e-4, "documents that see each other have another loss"


def slow_varlen(q, k, v, starts, starts_k, longest, longest_k, *, enable_gqa=False, **options):
    """Attend to each document by itself, with the arguments and shapes of torch's function."""
    assert q.shape == (32, 3, 8)
    assert (starts_k is starts, longest, longest_k, options) == (True, 16, 16, {"window_size": (-1, 0)})
    grouped = {"enable_gqa": enable_gqa}
    assert enable_gqa == (k.shape == (32, 1, 8))
    parts = [part.transpose(0, 1).split(starts.diff().tolist(), dim=1) for part in (q, k, v)]
    attended = [F.scaled_dot_product_attention(*part, is_causal=True, **grouped) for part in zip(*parts, strict=True)]
    return torch.cat(attended, dim=1).transpose(0, 1)


def older_varlen(q, k, *others, window_size=(-1, -1)):
    """Attend as torch 2.11 does, to which nobody says that heads are grouped."""
    return slow_varlen(q, k, *others, window_size=window_size, enable_gqa=k.shape[1] < q.shape[1])


@pytest.mark.parametrize(("num_kv_heads", "function"), [(3, slow_varlen), (1, slow_varlen), (1, older_varlen)])
def test_the_kernel_of_variable_lengths_gets_the_documents_of_all_sequences(num_kv_heads, function, monkeypatch):
    monkeypatch.setattr(torch_varlen, "varlen_attn", function)
    monkeypatch.setattr("gpt.model.transformer.needs_mask", lambda *_: False)
    model = build(small_config(num_layers=2, num_kv_heads=num_kv_heads))
    found = gradients(model, model(*batch(), documents=Documents(POSITIONS, STARTS)))
    for one, other in zip(found, one_by_one(model), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("attention", "head_dim", "dropout", "dtype", "expected"),
    [
        ("flash", 64, 0.0, torch.bfloat16, False),
        ("flash", 64, 0.0, torch.float16, False),
        ("math", 64, 0.0, torch.bfloat16, True),
        ("flash", 60, 0.0, torch.bfloat16, True),
        ("flash", 256, 0.0, torch.bfloat16, False),
        ("flash", 264, 0.0, torch.bfloat16, True),
        ("flash", 64, 0.1, torch.bfloat16, True),
        ("flash", 64, 0.0, torch.float32, True),
    ],
)
def test_the_kernel_of_variable_lengths_runs_where_it_can(attention, head_dim, dropout, dtype, expected, monkeypatch):
    x = torch.empty(1, dtype=dtype)
    assert needs_mask(attention, head_dim, dropout, x), "torch has no such kernel for a CPU"
    monkeypatch.setattr("gpt.kernels.documents.device_has_kernel", lambda _device: True)
    assert needs_mask(attention, head_dim, dropout, x) == expected


def test_the_log_says_how_documents_are_kept_apart(monkeypatch):
    config = small_config(dropout=0.0)
    expected = "a mask of 16 x 16 scores a sequence"
    assert describe_documents(config, torch.device("cpu"), torch.bfloat16) == expected
    monkeypatch.setattr("gpt.kernels.documents.device_has_kernel", lambda _device: True)
    assert describe_documents(config, torch.device("cpu"), torch.bfloat16) == "torch.nn.attention.varlen"


def test_a_micro_batch_without_a_counted_token_has_no_loss_and_no_gradient():
    mesh, (tokens, targets) = Mesh.create(1), batch()
    batches = [DocumentBatch(tokens, words, POSITIONS, STARTS) for words in (targets, torch.full_like(targets, -1))]
    results = []
    for micro_batches in (batches, batches[:1]):
        model = ZeroDataParallel(build(small_config(num_layers=1)), mesh.data, ZeroConfig(0))
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
        figures = train_step(model, optimizer, micro_batches, mesh)
        with model.gathered() as module:
            results.append([*figures, *(param.detach().clone() for param in module.parameters())])
        assert evaluate(model, batches[1:], mesh) == 0
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_compiled_blocks_are_compiled_once_for_any_documents():
    backend = Backend()
    model, eager = build(small_config(num_layers=2)), build(small_config(num_layers=2))
    compile_blocks(model, "nothing", backend)
    for documents in (Documents(POSITIONS, STARTS), Documents(torch.arange(16).repeat(2, 1), STARTS[[0, 3, 5]])):
        expected = gradients(eager, eager(*batch(), documents=documents))
        for one, other in zip(gradients(model, model(*batch(), documents=documents)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    assert len(backend.num_operations) == 1


def test_dropout_and_evaluation_use_the_mask():
    model = build(small_config(dropout=0.5, num_layers=1))
    documents = Documents(POSITIONS, STARTS)
    assert not model(*batch(), documents=documents).equal(model(*batch(), documents=documents))
    model.eval()
    loss = model(*batch(), documents=documents)
    assert loss.equal(model(*batch(), documents=documents))
    torch.testing.assert_close(loss, one_by_one(model)[0], rtol=0, atol=TOLERANCE)
