"""Offload on one GPU: the same training, states in pinned host memory instead of the device's, and a budget kept."""

import pytest
import torch
from torch import Tensor

from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from gpt.train_step import train_step
from parallel.memory_kinds import Placement
from parallel.mesh import Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from zero.checkpoint import resident
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig

pytestmark = pytest.mark.gpu
CONFIG = ModelConfig(num_layers=8, hidden_size=256, num_heads=4, seq_length=64, vocab_size=97, dropout=0.0)
PLACEMENTS = [("optimizer",), ("parameters",), ("optimizer", "parameters")]


def build(
    device: torch.device, stage: int, offload: OffloadConfig, dtype: torch.dtype
) -> tuple[Mesh, ZeroDataParallel, ZeroOptimizer]:
    mesh = Mesh.create(tensor_size=1, device_type=device.type)
    gpt = GPT(CONFIG, ReplicatedTokens(mesh.tensor)).to(device, dtype)
    initialize(gpt, seed=0)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(stage, bucket_numel=200_000), offload=offload)
    return mesh, model, ZeroOptimizer(model, torch.optim.AdamW, clip_norm=1.0, fused=True, lr=1e-3)


def micro_batches(device: torch.device, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(97, (4, 65), generator=generator).to(device) for _ in range(3)]


def losses(device: torch.device, stage: int, offload: OffloadConfig, num_steps: int = 6) -> list[float]:
    mesh, model, optimizer = build(device, stage, offload, torch.float64)
    return [train_step(model, optimizer, micro_batches(device, n), mesh)[0].item() for n in range(num_steps)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("states", PLACEMENTS)
def test_every_placement_gives_the_losses_of_no_offload(gpu, stage, states):
    """Three micro-batches in float64 would show a copy that is read too early."""
    if states == ("parameters",) and stage < 3:
        pytest.skip("nothing to offload: full parameters persist below stage 3")
    expected = losses(gpu, stage, NO_OFFLOAD)
    assert losses(gpu, stage, OffloadConfig("host", states)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("stage", "bytes_left"), [(2, 2), (3, 0)])
def test_offloaded_states_are_in_pinned_memory(gpu, stage, bytes_left):
    mesh, model, optimizer = build(gpu, stage, OffloadConfig("host"), torch.bfloat16)
    train_step(model, optimizer, micro_batches(gpu, 0), mesh)
    numel = sum(flat.layout.numel for flat in model.flats)
    assert resident.resident_states(model, optimizer).total == bytes_left * numel
    assert resident.resident_states(model, optimizer, Placement.HOST).total == (16 - bytes_left) * numel
    assert all(bucket.master.is_pinned() and bucket.grads.own.is_pinned() for bucket in optimizer.buckets)
    assert all(
        piece.param.device.type == "cpu" for bucket in optimizer.buckets for piece in optimizer.pieces_of(bucket)
    )


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_budget_is_kept(gpu, share):
    """The budget is a share of the peak without offload, both as the allocator counts them."""
    peaks, found = [], []
    for budget_gb in (None, share):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(gpu)
        before = torch.cuda.memory_allocated(gpu)
        offload = NO_OFFLOAD
        if budget_gb is not None:
            budget_gb = (before + share * peaks[0]) / 1e9
            offload = OffloadConfig("auto", accelerator_memory_gb=budget_gb, hidden_dim=256, min_chunk_size_m=0.2)
        mesh, model, optimizer = build(gpu, 3, offload, torch.float32)
        most = 0
        steps = []
        for step in range(6):
            steps.append(train_step(model, optimizer, micro_batches(gpu, step), mesh)[0].item())
            most = max(most, torch.cuda.max_memory_allocated(gpu))
        peaks.append(most - before)
        found.append(steps)
        del mesh, model, optimizer
    assert peaks[1] <= share * peaks[0]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
