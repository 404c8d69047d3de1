"""Steps on one GPU: the host never waits for the device, and the losses equal those on the CPU."""

import pytest
import torch
from torch import Tensor, nn

from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from gpt.train_step import train_step
from parallel.mesh import Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from tests.gpu.waiting import waiting_is_an_error
from zero.core.step.loss_scale import LossScale
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

pytestmark = pytest.mark.gpu
CONFIG = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=32, vocab_size=97, dropout=0.0)


def build(device: torch.device, stage: int, dtype: torch.dtype) -> tuple[Mesh, ZeroDataParallel, ZeroOptimizer]:
    mesh = Mesh.create(tensor_size=1, device_type=device.type)
    model: nn.Module = GPT(CONFIG, ReplicatedTokens(mesh.tensor)).to(device, dtype)
    initialize(model, seed=0)
    model = ZeroDataParallel(model, mesh.data, ZeroConfig(stage, bucket_numel=5000))
    scale = LossScale(2.0**10 if dtype is torch.float16 else 1.0, is_dynamic=dtype is torch.float16, device=device)
    return mesh, model, ZeroOptimizer(model, torch.optim.AdamW, loss_scale=scale, clip_norm=1.0, fused=True, lr=1e-3)


def micro_batches(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(97, (2, 33), generator=generator).to(device) for _ in range(2)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_never_waits_for_the_device(gpu, stage, dtype):
    mesh, model, optimizer = build(gpu, stage, dtype)
    batches = micro_batches(gpu)
    train_step(model, optimizer, batches, mesh)  # the first step makes the moments
    with waiting_is_an_error():
        train_step(model, optimizer, batches, mesh)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_five_steps_equal_those_on_the_cpu(gpu, stage):
    """Both are in float64: only the order of sums differs."""
    losses = []
    for device in (torch.device("cpu"), gpu):
        mesh, model, optimizer = build(device, stage, torch.float64)
        losses.append([train_step(model, optimizer, micro_batches(device), mesh)[0].item() for _ in range(5)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-9)
