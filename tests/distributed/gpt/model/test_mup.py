"""A model with muP trains along the tensor axis, and after a resume, as whole in one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt.builder.train_state import TrainState, build_optimizer
from gpt.checkpoint.checkpoint import load
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.saver import RunSaver
from gpt.settings.optimizer import OptimizerSettings
from gpt.shape.config import ModelConfig
from parallel.mesh import Mesh
from tests.distributed.gpt.test_tensor_parallel import TOLERANCE, batch, build, layout_of
from tests.ranks import run_ranks
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.engine import ZeroDataParallel
from zero.partition.config import ZeroConfig
from zero.step.loss_scale import LossScale

LR = 0.02
OPTIONS = {"dropout": 0.0, "num_kv_heads": 2, "tied_head": False, "mup_base_width": 8, "mup_base_head_dim": 4}
CONFIG = ModelConfig(2, 32, 4, 12, 97, **OPTIONS)
CPU = torch.device("cpu")


def build_state(tensor_size: int, is_split: bool, stage: int) -> TrainState:
    mesh = Mesh.create(tensor_size)
    model = ZeroDataParallel(build(CONFIG, layout_of(mesh.tensor, is_split)), mesh.data, ZeroConfig(stage, 2000))
    optimizer = build_optimizer(model, mesh.tensor, OptimizerSettings(LR, clip_norm=0.5), LossScale(device=CPU))
    return TrainState(mesh, model, optimizer, CPU, ActivationsConfig())


def train(state: TrainState, steps: range) -> list[float]:
    losses = []
    for step in steps:
        state.set_learning_rate(LR / (step + 1))
        loss = state.model(*batch(CONFIG, step, 0, 0))
        loss.backward()
        state.optimizer.step()
        losses.append(loss.item())
    return losses


def train_and_save(cases: list[tuple[bool, int]], folder: Path) -> list[list[float]]:
    losses = []
    for is_split, stage in cases:
        state = build_state(2, is_split, stage)
        losses.append(train(state, range(3)))
        saver = RunSaver(folder / str(is_split), state, keep=1, is_async=False)
        saver.start(Progress(3, 3))
        saver.wait()
        losses[-1] += train(state, range(3, 6))
    return losses


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
def test_the_tensor_axis_and_a_resume_change_nothing(tmp_path):
    expected = train(build_state(1, False, 0), range(6))
    for losses in run_ranks(2, train_and_save, [(False, 1), (True, 3)], tmp_path):
        for found in losses:
            assert found == pytest.approx(expected, abs=TOLERANCE, rel=0)
    for is_split in (False, True):
        resumed = build_state(1, False, 1)
        load(tmp_path / str(is_split) / "step-00000003", resumed)
        assert train(resumed, range(3, 6)) == pytest.approx(expected[3:], abs=TOLERANCE, rel=0)
