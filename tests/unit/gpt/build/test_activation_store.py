"""The store that `auto` stands for, and the work and the memory of a rank that it is chosen by."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gpt.build.train_state import build_mesh, token_layout
from gpt.build.activation_store import chosen_activations, memory_per_rank, parameters_of_rank, workload
from gpt.settings.parser import parse_settings
from parallel.host_memory import physical_bytes
from parallel.mesh import Mesh
from parallel.world import imitated_world
from tests.unit.gpt.build.test_train_state import BASE
from zero.activations.choice import Workload

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
    ("options", "expected"),
    [
        # Of 4 data ranks at stage 2 with 3 micro-batches of bf16: each micro-batch sends a reduction in fp32, and the
        # step one gather. Parameters take 2 bytes; each rank has a quarter of the sum in fp32, and of 4 + 8 more.
        (["--zero.stage=2"], {"state": 2 + 16 / 4, "sent": (3 * 4 + 2) * (3 / 4) / 3}),
        # At stage 3, two gathers for each micro-batch too.
        (["--zero.stage=3"], {"state": 18 / 4, "sent": (3 * 4 + 6 * 2) * (3 / 4) / 3}),
        # Of 2 data ranks, 6 micro-batches.
        (["--parallel.tensor_size=2"], {"state": 2 + 16 / 2, "sent": (6 * 4 + 2) * (1 / 2) / 6, "N_m": 2}),
        (
            ["--parallel.tensor_size=2", "--parallel.sequence_parallel=true"],
            {"state": 2 + 16 / 2, "sent": (6 * 4 + 2) * (1 / 2) / 6, "N_m": 1},
        ),
        # Two ranks share a sequence, so there are 6 micro-batches.
        (["--parallel.context_size=2"], {"state": 2 + 16 / 4, "sent": (6 * 4 + 2) * (3 / 4) / 6, "s": 16}),
    ],
)
def test_the_work_of_a_rank_is_that_of_its_states_tokens_and_messages(options: list[str], expected: dict[str, float]):
    types = "--zero.stage=2", "--train.precision=bf16", "--zero.accumulate_dtype=fp32", "--zero.reduce_dtype=fp32"
    settings = parse_settings([f"--config={BASE}", *SHAPE, *BATCH, *types, *options])
    with imitated_world(0, 4, 4, "gloo") as world:
        mesh = build_mesh(settings, world)
        tokens = token_layout(settings.parallel, mesh)
        found = workload(settings.model, settings.train, settings.zero, 3, mesh, tokens)
    tensor_size, numel = mesh.tensor.size, parameters_of_rank(settings.model, mesh.tensor.size)
    assert found == Workload(
        b=2,
        s=int(expected.get("s", 32)),
        h=64,
        L=6,
        k=3,
        N_m=int(expected.get("N_m", 1)),
        tensor_size=tensor_size,
        vocab_size=128,
        itemsize=2,
        state_bytes=pytest.approx(expected["state"] * numel),
        data_bytes=pytest.approx(expected["sent"] * numel),
        block_weights=12 * 64**2,
        block_width=12 * 64,
    )


def test_auto_is_the_store_that_the_memory_of_the_settings_or_of_the_machine_allows(caplog: pytest.LogCaptureFixture):
    settings = parse_settings([f"--config={BASE}", *SHAPE, *BATCH, "--activations.store=auto"])
    model, train, zero, mesh = settings.model, settings.train, settings.zero, Mesh.create(1)
    tokens = token_layout(settings.parallel, mesh)
    caplog.set_level("INFO")

    def chosen(store: str, memory_gb: float | None) -> str:
        hardware = replace(settings.activations.hardware, memory_gb=memory_gb)
        activations = replace(settings.activations, store=store, hardware=hardware)
        found = chosen_activations(activations, model, train, zero, mesh, tokens, CPU)
        assert replace(found, store=store) == activations
        return found.store

    assert chosen("none", memory_gb=1e-6) == "none"
    assert not caplog.messages
    assert [chosen("auto", memory_gb) for memory_gb in (None, 1.0, 0.004)] == ["keep", "keep", "partition_host"]
    assert "activations.store=keep, the first that holds a micro-batch of 2" in caplog.messages[0]
