"""Documents kept apart on a GPU: torch's kernel of variable lengths against a mask, without waits for the device."""

import numpy as np
import pytest
import torch
from torch import Tensor

from data.documents import DocumentBatch, packed_apart
from gpt.kernels.documents import Documents, device_has_kernel
from gpt.model.compiled_blocks import compile_blocks
from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from gpt.train_step import train_step
from parallel.mesh import Axis, Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from tests.gpu.waiting import waiting_is_an_error
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

pytestmark = pytest.mark.gpu
SEQ, VOCAB = 64, 97
CONFIG = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=SEQ, vocab_size=VOCAB, dropout=0.0)


def batch(seed: int, device: torch.device) -> DocumentBatch:
    generator = np.random.default_rng(seed)
    rows = [[generator.integers(0, VOCAB, length) for length in lengths] for lengths in ([40, 20, 3], [65], [2, 9])]
    return DocumentBatch.of(np.stack([packed_apart(row, SEQ) for row in rows])).to(device)


def gradients(model: GPT, batch: DocumentBatch) -> list[Tensor]:
    loss = model(batch.tokens, batch.targets, None, Documents(batch.positions, batch.starts))
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_kernel_of_variable_lengths_computes_what_a_mask_does(gpu, is_compiled):
    if not device_has_kernel(gpu):
        pytest.skip("torch has the kernel for A100 and later GPUs")
    tokens = ReplicatedTokens(Axis.trivial("tensor"))
    exact = GPT(CONFIG, tokens).to(gpu, torch.bfloat16)
    initialize(exact, seed=0)
    model = GPT(CONFIG, tokens).to(gpu, torch.bfloat16)
    model.load_state_dict(exact.state_dict())
    exact.float()  # with the same values, and the mask
    if is_compiled:
        compile_blocks(model, "nothing")
    for seed in range(3):
        for found, expected in zip(gradients(model, batch(seed, gpu)), gradients(exact, batch(seed, gpu)), strict=True):
            # bf16 has 8 bits: of each tensor, relative to its largest element.
            assert (found.float() - expected).abs().max() <= 2**-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_never_waits_for_the_device(gpu, dtype):
    mesh = Mesh.create(tensor_size=1, device_type="cuda")
    gpt = GPT(CONFIG, ReplicatedTokens(mesh.tensor)).to(gpu, dtype)
    initialize(gpt, seed=0)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(2))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, clip_norm=1.0, fused=True, lr=1e-3)
    batches = [batch(seed, gpu) for seed in range(2)]
    train_step(model, optimizer, batches, mesh)  # the first step makes the moments
    with waiting_is_an_error():
        train_step(model, optimizer, batches, mesh)
