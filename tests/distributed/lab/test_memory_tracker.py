"""The tracker of a real run against an independent count of its tensors, and against the paper's checkpoints."""

from collections import Counter
from functools import cache

import pytest
import torch

from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from gpt.train_step import train_step
from lab.observe.memory_tracker import MemoryTracker
from parallel.memory_kinds import TensorKind, allocate_buffer
from parallel.mesh import Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from tests.ranks import run_ranks
from zero.activations.checkpointed_blocks import ActivationsConfig, checkpointed_blocks
from zero.checkpoint import resident
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

CONFIG = ModelConfig(3, 32, 4, 16, 512, dropout=0.0)  # so many words that memory peaks in the loss
BATCH = 2


@cache
def run_on_two_ranks(stage: int, store: str, defragments_gradients: bool = True) -> list[list[dict]]:
    return run_ranks(2, run, stage, store, defragments_gradients)


def run(stage: int, store: str, defragments_gradients: bool) -> list[dict]:
    """Return what the tracker counts in two steps in bf16, and the sizes of the tensors at the end of each."""
    mesh, found = Mesh.create(tensor_size=1, allocate=allocate_buffer), []
    with MemoryTracker(torch.device("cpu")) as tracker:
        torch.set_default_dtype(torch.bfloat16)
        gpt = GPT(
            CONFIG, ReplicatedTokens(mesh.tensor), checkpointed_blocks(ActivationsConfig(store, defragment=False))
        )
        initialize(gpt, seed=0)
        model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(stage, 4000, defragment=defragments_gradients))
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, fused=True)
        micro_batches = [torch.zeros(BATCH, CONFIG.seq_length + 1, dtype=torch.int64) for _ in range(2)]
        for _ in range(2):
            tracker.restart()
            train_step(model, optimizer, micro_batches, mesh)
            found.append(
                {
                    "resident": +tracker.device.resident,
                    "peak": +tracker.device.peak,
                    "allocations": +tracker.device.num_allocations,
                    "states": resident.resident_states(model, optimizer),
                    "buffers": resident.buffer_bytes(model, optimizer),
                    "num_pieces": sum(len(optimizer.pieces_of(bucket)) for bucket in optimizer.buckets),
                }
            )
    return found


@pytest.mark.parametrize(("stage", "store"), [(0, "keep"), (1, "keep"), (2, "none"), (3, "none")])
def test_resident_bytes_are_those_of_the_tensors(stage: int, store: str):
    for found in run_on_two_ranks(stage, store):
        for step in found:
            resident, states = Counter(step["resident"]), step["states"]
            scalars_of_a_piece = 4  # AdamW counts steps
            assert resident.pop(TensorKind.PARAMETERS) == states.parameters
            assert resident.pop(TensorKind.GRADIENTS) == states.gradients
            assert resident.pop(TensorKind.MASTER) == states.master
            assert resident.pop(TensorKind.MOMENTS) == states.moments + step["num_pieces"] * scalars_of_a_piece
            assert resident.pop(TensorKind.BUFFERS, 0) == sum(step["buffers"].values())
            assert set(resident) <= {TensorKind.OTHER}, "no activation and no checkpoint outlives its step"
            assert resident[TensorKind.OTHER] < 1000, "two micro-batches and a few scalars"


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_and_their_buffers_are_freed_between_steps_if_memory_is_not_defragmented(stage):
    kept, freed = (run_on_two_ranks(stage, "none", defragments)[0][1] for defragments in (True, False))
    assert kept["resident"][TensorKind.GRADIENTS] == kept["states"].gradients > 0
    assert freed["resident"][TensorKind.GRADIENTS] == freed["states"].gradients == 0
    assert freed["allocations"][TensorKind.GRADIENTS] > kept["allocations"][TensorKind.GRADIENTS]
    assert (
        kept["resident"][TensorKind.BUFFERS]
        > freed["resident"][TensorKind.BUFFERS]
        == freed["buffers"]["gradient cast"]
    )
    assert freed["peak"][TensorKind.BUFFERS] == freed["buffers"]["gradient cast"], "when activations need the memory"


def test_checkpoints_at_the_peak_are_one_input_a_layer():
    """They are batch x sequence x hidden x 2 bytes (bf16) per layer, of one micro-batch (paper, section 3.2)."""
    for found in run_on_two_ranks(1, "keep"):
        checkpoint_bytes = 2 * BATCH * CONFIG.seq_length * CONFIG.hidden_size
        first, second = found
        assert second["peak"][TensorKind.CHECKPOINTS] == CONFIG.num_layers * checkpoint_bytes
        assert second["allocations"][TensorKind.CHECKPOINTS] == 2 * CONFIG.num_layers
        for kind in (TensorKind.MASTER, TensorKind.MOMENTS, TensorKind.BUFFERS):
            assert kind not in second["allocations"], "states are allocated once"
        assert first["allocations"][TensorKind.MOMENTS] == 3 * first["num_pieces"]
