"""Phases of steps and evaluations."""

from contextlib import nullcontext

import torch

from gpt.model.transformer import GPT
from gpt.train_step import evaluate, train_step
from parallel.mesh import Mesh
from tests.unit.gpt.model.models import ONE_DEVICE, small_config
from zero import ZeroConfig, ZeroDataParallel, ZeroOptimizer


def test_every_micro_batch_begins_a_phase_which_the_watchdog_takes_for_progress():
    """Stages 0 and 1 have no collective between the micro-batches of a step, or of an evaluation."""
    mesh, phases = Mesh.create(1), []
    mesh.log.on_phase = lambda phase: nullcontext(phases.append(phase))
    model = ZeroDataParallel(GPT(small_config(num_layers=1), ONE_DEVICE), mesh.data, ZeroConfig(1))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    batches = [torch.randint(small_config().vocab_size, (1, 9)) for _ in range(3)]
    train_step(model, optimizer, batches, mesh)
    assert phases == ["forward", "backward"] * 3 + ["update"]
    phases.clear()
    evaluate(model, batches, mesh)
    assert phases == ["evaluation"] * 4  # the last one computes the mean
