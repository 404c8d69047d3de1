"""Checkpoints on one GPU: they hold the state at which they were started, while training continues."""

import pytest
import torch

from gpt.builder.train_state import TrainState
from gpt.checkpoint.checkpoint import RunSaver, load, rank_state
from gpt.checkpoint.folder import Kept
from gpt.checkpoint.layout import Progress, read_run
from gpt.train_step import train_step
from tests.gpu.test_step import build, micro_batches
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.checkpoint.saved_state import SavedState

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_continues_while_a_checkpoint_is_written(gpu, tmp_path, stage):
    state = TrainState(*build(gpu, stage, torch.bfloat16), gpu, ActivationsConfig())
    batches = micro_batches(gpu)
    train_step(state.model, state.optimizer, batches, state.mesh)
    expected = {name: tensor.to("cpu", copy=True) for name, tensor in rank_state(state).tensors().items()}
    saver = RunSaver(tmp_path, state, kept=Kept(1), is_async=True)
    saver.start(Progress(1, 4))
    for _ in range(3):
        train_step(state.model, state.optimizer, batches, state.mesh)
    checkpoint = saver.wait()
    saved = SavedState(checkpoint, read_run(checkpoint).layout["state"]).file(0)
    assert saved.entries.keys() == expected.keys()
    assert all(saved.tensor(name).equal(tensor) for name, tensor in expected.items())
    again = TrainState(*build(gpu, 3 - stage, torch.bfloat16), gpu, ActivationsConfig())
    assert load(checkpoint, again) == Progress(1, 4)
    assert torch.cuda.get_rng_state().equal(expected["random.cuda"])
