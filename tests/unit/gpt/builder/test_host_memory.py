"""The host memory of a node that its ranks need, by hand, and the run that is refused because it needs more."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt.builder import host_memory
from gpt.builder.closed_forms import parameters_of_rank
from gpt.builder.host_memory import bytes_on_host, check_host_memory
from gpt.builder.train_state import build_mesh
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from parallel.world import World, imitated_world

BASE = """{data: {path: nowhere}, train: {precision: bf16, micro_batch_size: 2, global_batch_size: 24},
  model: {num_layers: 3, hidden_size: 64, num_heads: 4, seq_length: 16, vocab_size: 320},
  zero: {bucket_numel: 60000}}"""


def settings_of(*options: str) -> Settings:
    return parse_settings([f"--config={BASE}", *options])


ROOM = r"snapshot_every=2 places 0\.\d+ GB .*, and checkpoint\.snapshot_dir=.* has 0\.\d+ GB free; give .*--shm-size"
SAVES = "--checkpoint.every=1", "--checkpoint.asynchronous=true"


@pytest.mark.parametrize(
    ("options", "num_ranks", "states", "saves"),  # bytes of each element that a rank owns
    [
        # Master weights and two moments in fp32, and gradients in the type of their sum.
        (["--zero.stage=2", "--offload.mode=host", "--zero.accumulate_dtype=bf16"], 2, 14, 0),
        (["--zero.stage=2", *SAVES], 2, 0, 12),
        (["--zero.stage=2", "--checkpoint.every=1", "--checkpoint.asynchronous=false"], 2, 0, 0),
        (["--zero.stage=2", "--checkpoint.every=0", "--checkpoint.asynchronous=true"], 2, 0, 0),
    ],
)
def test_a_rank_places_its_part_of_the_states_and_of_their_copies(
    options: list[str], num_ranks: int, states: int, saves: int
):
    settings = settings_of(*options)
    with imitated_world(0, num_ranks, num_ranks, "gloo") as world:
        on_host = bytes_on_host(settings, build_mesh(settings, world), lambda num_bytes: num_bytes)
    numel = parameters_of_rank(settings.model, 1)
    assert on_host.activations == 0
    # Each of a few buckets is rounded up to a whole element for each rank.
    assert on_host.states == pytest.approx(states * numel / num_ranks, rel=1e-4)
    assert on_host.saves == pytest.approx(saves * numel / num_ranks, rel=1e-4)
    assert on_host.total == on_host.states + on_host.saves


@pytest.mark.parametrize(("num_nodes", "copies"), [(1, 2), (2, 4), (4, 4)])
def test_two_generations_of_snapshots_are_on_two_nodes_beside_the_copy_they_are_written_from(
    num_nodes: int, copies: int
):
    settings = settings_of("--zero.stage=2", "--checkpoint.snapshot_every=2", *SAVES)
    with imitated_world(0, 4, 4 // num_nodes, "gloo") as world:
        on_host = bytes_on_host(settings, build_mesh(settings, world), float, num_nodes)
    owned = 12 * parameters_of_rank(settings.model, 1) / 4
    assert on_host.snapshots == pytest.approx(copies * owned, rel=1e-4)
    assert on_host.saves == pytest.approx(2 * owned, rel=1e-4)  # checkpoints have a copy of their own


def test_snapshots_that_do_not_fit_their_folder_are_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = settings_of("--checkpoint.snapshot_every=2", f"--checkpoint.snapshot_dir={tmp_path}")
    mesh, world = Mesh.create(1), World(0, 1, 0, 1, torch.device("cpu"))
    num_bytes = bytes_on_host(settings, mesh, float).snapshots
    held = settings.checkpoint.snapshot_folder(settings.run.dir) / "step-00000002" / "file"
    held.parent.mkdir(parents=True)
    held.write_bytes(b"x" * 4096)  # of an old generation, which is replaced
    room = int(num_bytes) - held.stat().st_blocks * 512
    for free, is_refused in ((room + 1, False), (room - 1, True)):
        monkeypatch.setattr(host_memory.os, "statvfs", lambda _, free=free: SimpleNamespace(f_bavail=free, f_frsize=1))
        with pytest.raises(ConfigError, match=ROOM) if is_refused else nullcontext():
            check_host_memory(settings, mesh, world)


def test_all_ranks_of_a_node_have_to_fit_its_memory_up_to_the_last_byte(monkeypatch: pytest.MonkeyPatch):
    settings = settings_of("--activations.store=partition_host")
    mesh, world = Mesh.create(1), World(0, 4, 0, 4, torch.device("cpu"))
    num_bytes = 4 * 3 * 2 * 16 * 64 * 2
    monkeypatch.setattr(host_memory, "available_bytes", lambda: num_bytes)
    check_host_memory(settings, mesh, world)
    large = replace(settings, model=replace(settings.model, seq_length=160_000_000))  # instead of 16 tokens
    monkeypatch.setattr(host_memory, "available_bytes", lambda: num_bytes - 1)
    total = num_bytes / 1e9 * 1e7
    for refused, figures in ((settings, "0.0 GB"), (large, rf"{total:,.1f} GB .* {total:,.1f} GB too little")):
        with pytest.raises(ConfigError, match=rf"4 ranks.*activations.store=partition_host {figures}"):
            check_host_memory(refused, mesh, world)
