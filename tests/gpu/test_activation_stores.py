"""Activation stores on one GPU: checkpoints are copied to pinned memory and back, and the host never waits for them."""

import pytest
import torch
from torch import Tensor

from gpt.builder.train_state import build_model
from gpt.model.transformer import initialize
from gpt.shape.config import ModelConfig
from gpt.train_step import train_step
from parallel.memory_kinds import TensorKind
from parallel.mesh import Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from tests.gpu.waiting import waiting_is_an_error
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.core.memory.allocators import host_allocator
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

pytestmark = pytest.mark.gpu
CONFIG = ModelConfig(6, 256, 4, seq_length=128, vocab_size=97, dropout=0.1, attention="math")
STORES = ["keep", "partition_host", "selective"]


def build(
    device: torch.device, stage: int, activations: ActivationsConfig
) -> tuple[Mesh, ZeroDataParallel, ZeroOptimizer]:
    mesh = Mesh.create(tensor_size=1, device_type=device.type)
    gpt = build_model(CONFIG, activations, ReplicatedTokens(mesh.tensor), device, torch.float32)
    initialize(gpt, seed=0)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(stage, bucket_numel=50_000))
    torch.manual_seed(5)
    return mesh, model, ZeroOptimizer(model, torch.optim.AdamW, clip_norm=1.0, fused=True, lr=1e-3)


def micro_batches(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(97, (8, 129), generator=generator).to(device) for _ in range(2)]


def losses(device: torch.device, stage: int, activations: ActivationsConfig) -> list[float]:
    mesh, model, optimizer = build(device, stage, activations)
    return [train_step(model, optimizer, micro_batches(device), mesh)[0].item() for _ in range(5)]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("defragment", [True, False])
@pytest.mark.parametrize("store", STORES)
def test_every_store_gives_the_losses_of_none_dropout_included(gpu, store, defragment, stage):
    expected = losses(gpu, stage, ActivationsConfig("none"))
    assert losses(gpu, stage, ActivationsConfig(store, 2, defragment)) == expected


@pytest.mark.parametrize("store", STORES)
def test_no_store_waits_for_the_device(gpu, store):
    mesh, model, optimizer = build(gpu, 2, ActivationsConfig(store))
    batches = micro_batches(gpu)
    train_step(model, optimizer, batches, mesh)
    with waiting_is_an_error():
        train_step(model, optimizer, batches, mesh)


def test_the_host_holds_the_checkpoints_and_the_device_what_is_in_transit(gpu):
    """The memory that a step leaves differs by the slab; from the second step on the allocator reserves nothing."""
    assert host_allocator(gpu, TensorKind.CHECKPOINTS)(8, torch.float32).is_pinned()
    resident = {}
    for store in ("keep", "partition_host"):
        mesh, model, optimizer = build(gpu, 2, ActivationsConfig(store))
        for _ in range(2):
            train_step(model, optimizer, micro_batches(gpu), mesh)
        resident[store] = torch.cuda.memory_allocated(gpu)
        reserved = torch.cuda.memory_reserved(gpu)
        for _ in range(10):
            train_step(model, optimizer, micro_batches(gpu), mesh)
        assert torch.cuda.memory_reserved(gpu) == reserved
        del mesh, model, optimizer
    checkpoint_bytes = 8 * 128 * 256 * 4
    assert resident["keep"] - resident["partition_host"] == (6 - 2) * checkpoint_bytes
