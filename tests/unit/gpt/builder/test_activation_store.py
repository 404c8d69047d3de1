"""The store that `auto` stands for, and the work and the memory of a rank that it is chosen by."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from gpt.builder import activation_store
from gpt.builder.activation_store import chosen_activations, memory_per_rank, workload
from gpt.builder.closed_forms import parameters_of_rank
from gpt.settings.parser import parse_settings
from parallel.host_memory import physical_bytes
from parallel.mesh import Axis, Mesh
from parallel.world import imitated_world
from tests.ranks import run_cases
from tests.unit.gpt.builder.test_train_state import BASE

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = "--model.num_layers=6", "--model.hidden_size=64", "--model.num_heads=4", "--model.seq_length=32"
BATCH = "--train.micro_batch_size=2", "--train.global_batch_size=24", "--activations.layers_per_checkpoint=3"


def test_a_rank_has_the_memory_of_its_gpu_or_a_part_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))
    with imitated_world(0, 8, 8, "gloo"):
        mesh = Mesh.create(2)
        assert memory_per_rank(GPU, mesh) == 80e9
        assert 8 * memory_per_rank(CPU, mesh) == physical_bytes()


@pytest.mark.parametrize(
    ("option", "data_size", "state", "sent"),
    [
        # Of 4 data ranks at stage 2 with 3 micro-batches of bf16: each micro-batch sends a reduction in fp32, and the
        # step one gather. Parameters take 2 bytes; each rank has a quarter of the sum in fp32, and of 4 + 8 more.
        ("--zero.stage=2", 4, 2 + 16 / 4, (3 * 4 + 2) * (3 / 4) / 3),
        # At stage 3, two gathers for each micro-batch too.
        ("--zero.stage=3", 4, 18 / 4, (3 * 4 + 6 * 2) * (3 / 4) / 3),
        # Of 2 data ranks, 6 micro-batches.
        ("--parallel.tensor_size=2", 2, 2 + 16 / 2, (6 * 4 + 2) * (1 / 2) / 6),
        # The states of 4 ranks are divided by 2, and the step has an all-reduce of half of the gradients.
        ("--parallel.shard_size=2", 4, 2 + 16 / 2, ((3 * 4 + 2) * (1 / 2) + 2 * 4 / 2 * (1 / 2)) / 3),
        # Two ranks share a sequence, so there are 6 micro-batches.
        ("--parallel.context_size=2", 4, 2 + 16 / 4, (6 * 4 + 2) * (3 / 4) / 6),
    ],
)
def test_the_work_of_a_rank_has_its_states_tokens_and_messages(option: str, data_size: int, state: float, sent: float):
    types = "--zero.stage=2", "--train.precision=bf16", "--zero.accumulate_dtype=fp32", "--zero.reduce_dtype=fp32"
    settings = parse_settings([f"--config={BASE}", *SHAPE, *BATCH, *types, option])
    found = workload(settings, data_size, num_replicas=1)
    numel = parameters_of_rank(settings.model, settings.parallel.tensor_size)
    assert found.state_bytes == pytest.approx(state * numel)
    assert found.data_bytes == pytest.approx(sent * numel)
    assert (found.b, found.s, found.k, found.N_m) == (2, 32 // settings.parallel.context_size, 3, 1)


def test_auto_is_the_store_that_the_memory_of_the_settings_or_of_the_machine_allows(caplog: pytest.LogCaptureFixture):
    settings = parse_settings([f"--config={BASE}", *SHAPE, *BATCH, "--activations.store=auto"])
    caplog.set_level("INFO")

    def chosen(store: str, memory_gb: float | None) -> str:
        hardware = replace(settings.activations.hardware, memory_gb=memory_gb)
        activations = replace(settings.activations, store=store, hardware=hardware)
        changed = replace(settings, activations=activations).with_gradient_types(1)
        found = chosen_activations(changed, Mesh.create(1), Axis.trivial("tensor"), CPU)
        assert replace(found, store=store) == activations
        return found.store

    assert chosen("none", memory_gb=1e-6) == "none"
    assert not caplog.messages
    assert [chosen("auto", memory_gb) for memory_gb in (None, 1.0, 0.004)] == ["keep", "keep", "partition_host"]
    assert "activations.store=keep, the first that holds a micro-batch of 2" in caplog.messages[0]


def chosen_of_ranks(store: str) -> tuple[str, float | None]:
    """Return what is chosen if the second tensor rank has much less memory than the first."""
    mesh = Mesh.create(2)
    settings = parse_settings(
        [f"--config={BASE}", *SHAPE, *BATCH, "--parallel.tensor_size=2", f"--activations.store={store}"]
    )
    with patch.object(activation_store, "memory_per_rank", lambda *_: (1e9, 2e6)[mesh.tensor.rank]):
        found = chosen_activations(settings.with_gradient_types(1), mesh, mesh.tensor, CPU)
    return found.store, found.budget_gb


def test_all_ranks_choose_by_the_memory_of_the_one_that_has_least():
    for first, second in run_cases(2, chosen_of_ranks, [("auto",), ("planned",)]):
        assert first == second
