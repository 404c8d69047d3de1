"""Host memory while a checkpoint is written and read: no more than what a rank owns, and a constant."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gpt.builder.train_state import TrainState, build
from gpt.checkpoint.checkpoint import RunSaver, load, rank_state
from gpt.checkpoint.folder import Kept
from gpt.checkpoint.layout import Progress
from gpt.settings.data import DataSettings
from gpt.settings.settings import Settings
from gpt.settings.training import TrainSettings
from gpt.shape.config import ModelConfig
from lab.bench.rounds import process_memory
from parallel.mesh import Mesh
from tests.oracle.deepspeed_files import write_deepspeed
from tests.ranks import run_ranks
from zero.checkpoint.folders.state import DistributedState
from zero.checkpoint.sealed_file import CHUNK_BYTES
from zero.settings.config import ZeroConfig

CONSTANT = 4 * CHUNK_BYTES
MODEL = ModelConfig(16, 640, 10, 128, 8192, dropout=0.0)  # 84 million parameters: 1 GB of masters and moments


def build_state(stage: int) -> TrainState:
    mesh = Mesh.create(1)
    train = TrainSettings(precision="bf16", micro_batch_size=1, global_batch_size=mesh.data.size)
    settings = Settings(MODEL, DataSettings(path="unread"), zero=ZeroConfig(stage), train=train)
    return build(settings, mesh, torch.device("cpu"))


def peak_growth(action: Callable[[], object], above_what_stays: bool = True) -> int:
    """Return the bytes by which resident memory during an action exceeds its value before, or that after if larger.

    If not `above_what_stays`, only the value before the action counts.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = process_memory("VmRSS")
    action()
    return process_memory("VmHWM") - (max(before, process_memory("VmRSS")) if above_what_stays else before)


def save(saver: RunSaver) -> None:
    saver.start(Progress(1))
    saver.wait()


def save_and_load(folder: Path) -> dict[str, int]:
    state = build_state(2)
    ids = torch.zeros(1, 17, dtype=torch.int64)
    state.model(ids[:, :-1], ids[:, 1:]).backward()
    state.optimizer.step()
    waiting, behind = (
        RunSaver(folder / str(is_async), state, kept=Kept(1), is_async=is_async) for is_async in (False, True)
    )
    found = {"owned": sum(tensor.nbytes for tensor in rank_state(state).tensors().values())}
    found["save"] = peak_growth(lambda: save(waiting))
    found["save behind"] = peak_growth(lambda: save(behind), above_what_stays=False)
    other = build_state(3)
    found["load"] = peak_growth(lambda: load(folder / "False" / "step-00000001", other))
    found["tensor"] = max(4 * param.numel() for param in other.model.module.parameters())
    dcp.save(DistributedState(state.model, state.optimizer).state_dict(), checkpoint_id=folder / "dcp")
    found["load of DCP"] = peak_growth(lambda: load(folder / "dcp", other))
    module = state.model.unwrap().float()
    if state.mesh.rank == 0:
        zeros = {param: torch.zeros_like(param.detach()) for param in module.parameters()}
        moments = {
            param: {"step": torch.ones(()), "exp_avg": zero, "exp_avg_sq": zero} for param, zero in zeros.items()
        }
        optimizer = SimpleNamespace(param_groups=[{"params": list(zeros)}], state=moments)
        write_deepspeed(folder / "deepspeed", 2, 2, module, optimizer)
    state.mesh.barrier()
    found["load of DeepSpeed"] = peak_growth(lambda: load(folder / "deepspeed", other))
    return found


@pytest.mark.full
def test_a_rank_needs_a_constant_buffer_beside_what_it_owns(tmp_path):
    for found in run_ranks(2, save_and_load, tmp_path):
        assert found["owned"] > 10 * CHUNK_BYTES
        assert found["save"] < CONSTANT
        assert found["save behind"] < found["owned"] + CONSTANT
        assert found["load"] < CONSTANT
        assert found["load of DCP"] < found["tensor"] + CONSTANT
        # The files are mapped to memory, and have twice as much; the kernel maps pages around those that are read.
        assert found["load of DeepSpeed"] < 1.5 * found["owned"]
