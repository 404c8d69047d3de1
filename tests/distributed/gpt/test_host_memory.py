"""The forecast of host memory equals what a run allocates there, except for the gaps between parameters."""

import math
from dataclasses import astuple
from unittest import mock

import pytest
import torch

from gpt.builder.host_memory import bytes_on_host, check_host_memory
from gpt.builder.train_state import build, build_mesh
from gpt.settings.parser import parse_settings
from gpt.train_step import train_step
from parallel.host_memory import pinned_bytes
from parallel.memory_kinds import Placement, TensorKind
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from parallel.world import World
from tests.ranks import run_ranks
from zero.checkpoint.rank_state import RankState
from zero.checkpoint.resident import resident_states
from zero.checkpoint.writer import HostCopies
from zero.core.memory.allocators import host_allocator
from zero.homes import on_host

CPU = torch.device("cpu")
BASE = """{data: {path: nowhere}, train: {precision: bf16, micro_batch_size: 2, global_batch_size: 8},
  model: {num_layers: 3, hidden_size: 64, num_heads: 4, seq_length: 16, vocab_size: 320},
  checkpoint: {every: 1}, zero: {bucket_numel: 60000}, offload: {mode: host}}"""
PINNED = {TensorKind.GRADIENTS, TensorKind.MASTER, TensorKind.PARAMETERS}


def forecast_and_use(arguments: list[str]) -> list[tuple[float, float]]:
    """(forecast, use) of host memory: of states, of checkpoints, of copies, and of states whose sizes are rounded."""
    settings = parse_settings([f"--config={BASE}", *arguments])
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = build_mesh(settings, World(rank, size, rank, size, CPU))
    sizes: list[int] = []

    def noted_allocator(device: torch.device, kind: TensorKind):
        allocate = host_allocator(device, kind)

        def noted(numel: int, dtype: torch.dtype) -> torch.Tensor:
            sizes.extend([numel * dtype.itemsize] if kind in PINNED else [])
            return allocate(numel, dtype)

        return noted

    with mock.patch.object(on_host, "host_allocator", noted_allocator):
        state = build(settings, mesh, CPU)
        num_micro_batches = settings.train.num_micro_batches(mesh.data.size)
        train_step(state.model, state.optimizer, [torch.randint(300, (2, 17))] * num_micro_batches, mesh)
    states = resident_states(state.model, state.optimizer, Placement.HOST)
    copies = HostCopies(state.device).take(RankState(state.model, state.optimizer).owned())
    if state.model.replica_axis.rank:
        copies = {}
    checkpoints = 0
    if settings.activations.store == "partition_host":
        numel = 2 * settings.model.seq_length * settings.model.hidden_size
        checkpoints = 3 * numel * 2 / mesh.tensor.size
    forecast = bytes_on_host(settings, mesh, lambda num_bytes: num_bytes)
    used = [states.total, checkpoints, sum(copy.nbytes for copy in copies.values() if copy.dim()), 0]
    rounded = bytes_on_host(settings, mesh, lambda num_bytes: pinned_bytes(num_bytes, math.inf))
    pageable = states.moments + sum(pinned_bytes(num_bytes, math.inf) for num_bytes in sizes)
    return [*zip(astuple(forecast), used, strict=True), (rounded.states, pageable)]


def test_the_forecast_is_what_a_step_and_a_save_allocate():
    for size, *arguments in [
        (2, "--zero.stage=2"),
        (2, "--zero.stage=3", "--activations.store=partition_host"),
        (2, "--zero.stage=1", "--parallel.shard_size=1", "--train.precision=fp32"),
        (2, "--zero.stage=3", "--train.precision=fp32"),
        (2, "--zero.stage=3", "--offload.states=[parameters]", "--optimizer.name=sgd"),
        (2, "--zero.stage=2", "--zero.bucket_numel=null", "--activations.layers_per_checkpoint=2"),
        (4, "--zero.stage=3", "--parallel.tensor_size=2", "--activations.store=partition_host"),
    ]:
        for found in run_ranks(size, forecast_and_use, arguments):
            for forecast, used in found:
                assert forecast == pytest.approx(used, rel=0.01)  # gaps: parameters begin at multiples of 64 elements


def test_a_run_that_does_not_fit_names_what_needs_the_memory(monkeypatch):
    arguments = ["--zero.stage=2", "--activations.store=partition_host", "--model.hidden_size=65536"]
    settings = parse_settings([f"--config={BASE}", *arguments])
    message = r"mode=host [\d.,]+ GB .*store=partition_host [\d.,]+ GB .*asynchronous=true [\d.,]+ GB .* too little"
    with pytest.raises(ConfigError, match=message):
        check_host_memory(settings, Mesh.create(1), World(0, 1, 0, 1, CPU))
