"""No step of any settings would race on a GPU, by the checker of streams."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt.builder.train_state import TrainState, build, build_mesh
from gpt.checkpoint.checkpoint import RunSaver, rank_state
from gpt.checkpoint.folder import Kept
from gpt.checkpoint.layout import Progress
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.train_step import evaluate, train_step
from lab.dryrun.dry_run import blank_micro_batches, dry_run
from lab.observe.memory_tracker import MemoryTracker
from lab.races.stream_checker import StreamError, streams_checked
from parallel.mesh import Mesh
from parallel.streams import announce_host_read
from parallel.world import World, imitated_world
from tests.ranks import run_ranks
from zero.checkpoint.rank_state import RankState
from zero.checkpoint.writer import HostCopies
from zero.core.buckets.flat import FlatParameters
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import OffloadConfig, ZeroConfig

OFFLOADS = {
    "none": {},
    "host": {"offload.mode": "host"},
    "optimizer": {"offload.mode": "host", "offload.states": "[optimizer]"},
    "parameters": {"offload.mode": "host", "offload.states": "[parameters]"},
    # Chunks of a few blocks, and room for some of them: the planner places and caches others in the third step.
    "auto": {
        "offload.mode": "auto",
        "offload.hidden_dim": 32,
        "offload.min_chunk_size_m": 0.004,
        "offload.search_range_m": 0.004,
    },
}
FP32_SUMS = "--zero.sum_over_ranks=fp32"
FP32_SUMS_OVER_ALL = f"{FP32_SUMS} --zero.optimizer_over=all"
FP8 = "--train.matmul=fp8 --zero.gather_dtype=fp8 --zero.optimizer_over=all"
FACTORS = {
    "stage": [0, 1, 2, 3],
    "sizes": [(4, 2, 2), (4, 2, 1), (4, None, 2), (2, None, 1)],  # data, shard, tensor
    "num_micro_batches": [1, 3],
    "accumulate": ["local", "reduce"],
    "store": ["none", "selective", "keep", "partition", "partition_host"],
    "offload": [*OFFLOADS],
    "precision": ["bf16", "fp32"],
    "optimizer": ["adamw", "adamw8bit", "adamw_bf16", "muon", "soap"],
    "others": [
        "",
        "--parallel.sequence_parallel=true",
        "--zero.overlap=false",
        "--zero.defragment=true",
        "--activations.defragment=false",
        "--zero.reduce_dtype=bf16",
        FP32_SUMS,
        FP32_SUMS_OVER_ALL,
        FP8,
    ],
}


def settings_of(combination: dict) -> Settings:
    data_size, shard_size, tensor_size = combination["sizes"]
    options = {
        "model.num_layers": 3,
        "model.hidden_size": 32,
        "model.num_heads": 4,
        "model.seq_length": 16,
        "model.vocab_size": 97,
        "model.vocab_multiple": 8,
        "data.path": "unread",
        "zero.stage": combination["stage"],
        "zero.bucket_numel": 4096,
        "zero.accumulate": combination["accumulate"],
        "parallel.tensor_size": tensor_size,
        "parallel.shard_size": "null" if shard_size is None else shard_size,
        "activations.store": combination["store"],
        "train.precision": combination["precision"],
        "optimizer.name": combination["optimizer"],
        "train.micro_batch_size": 2,
        "train.global_batch_size": 2 * data_size * combination["num_micro_batches"],
        **OFFLOADS[combination["offload"]],
    }
    if combination["offload"] == "auto":
        least = (3e-4 if combination["stage"] == 3 else 1.5e-3) * (2 if combination["precision"] == "fp32" else 1)
        if combination["optimizer"] == "soap" and combination["stage"] == 3:
            least = 8e-4  # its update has several matrices of the size of one at once
        options["offload.accelerator_memory_gb"] = least * 2 / tensor_size  # holds a part of the states
    return parse_settings([*(f"--{name}={value}" for name, value in options.items()), *combination["others"].split()])


def is_valid(combination: dict) -> bool:
    has_replicas = combination["sizes"][2] > 1 and "sequence" not in combination["others"]
    if combination["store"] == "partition" and not has_replicas:
        return False
    if combination["others"] == FP8 and combination["precision"] == "fp32":  # a GPU has no such kernels
        return False
    if combination["offload"] == "parameters" and combination["stage"] < 3:
        return False
    return "sequence" not in combination["others"] or combination["sizes"][2] > 1


def run(settings: Settings, world: World) -> None:
    """Train some steps, with all that may come between them, and check the streams."""
    # With the tracker, the offload planner knows what a step needs, and places as much as there is room for.
    tracker = MemoryTracker(world.device) if settings.offload.mode == "auto" else nullcontext()
    with tracker, streams_checked(world.device):
        mesh = build_mesh(settings, world)
        state = build(settings, mesh, world.device)
        micro_batches = blank_micro_batches(settings.train, settings.model.seq_length, mesh.data.size)
        copies = HostCopies(world.device)

        def step() -> None:
            train_step(state.model, state.optimizer, micro_batches, mesh)

        step()
        step()  # the last one that the offload planner records
        break_off(state, micro_batches[0])
        step()
        with torch.no_grad():
            for param in state.model.module.parameters() if settings.zero.stage < 3 else ():
                param.mul_(1.0)
        announce_host_read(copies.take(rank_state(state).tensors()).values())
        step()
        evaluate(state.model, micro_batches, mesh)
        step()
        announce_host_read(copies.take(rank_state(state).tensors()).values())
        with state.model.gathered(modify=True) as module:
            for param in module.parameters():
                param.mul_(1.0)
        step()


def break_off(state: TrainState, tokens: torch.Tensor) -> None:
    """Discard the gradients of a backward, and leave a forward before its end, while parameters are prefetched."""
    state.model(tokens[:, :-1], tokens[:, 1:]).backward()
    state.optimizer.zero_grad()

    def fail(*_: object) -> None:
        raise KeyError

    hook = state.model.module.blocks[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        state.model(tokens[:, :-1], tokens[:, 1:])
    hook.remove()


def check_imitated(combination: dict) -> None:
    data_size, _, tensor_size = combination["sizes"]
    num_ranks = data_size * tensor_size
    with imitated_world(num_ranks - 1, num_ranks, num_ranks, "nccl") as world:
        run(settings_of(combination), world)


CHOSEN = [  # together, these have every value of every factor
    (0, (4, 2, 2), 3, "local", "partition", "none", "bf16", "muon", ""),
    (1, (4, None, 2), 3, "local", "partition_host", "optimizer", "bf16", "soap", "--activations.defragment=false"),
    (1, (4, 2, 1), 1, "reduce", "selective", "host", "fp32", "adamw8bit", "--zero.reduce_dtype=bf16"),
    (2, (4, 2, 2), 3, "reduce", "keep", "none", "bf16", "adamw_bf16", "--parallel.sequence_parallel=true"),
    (3, (4, 2, 2), 1, "reduce", "partition_host", "auto", "bf16", "adamw", ""),
    (3, (2, None, 1), 3, "reduce", "none", "host", "fp32", "muon", "--zero.defragment=true"),
    (3, (4, None, 2), 1, "local", "selective", "parameters", "bf16", "adamw", "--zero.overlap=false"),
    (2, (4, 2, 1), 3, "reduce", "none", "none", "bf16", "adamw", FP32_SUMS),
    (2, (4, 2, 1), 1, "reduce", "none", "none", "bf16", "adamw", FP32_SUMS_OVER_ALL),
    (3, (4, 2, 2), 3, "reduce", "none", "host", "bf16", "adamw", FP8),
]


def test_the_chosen_settings_have_every_value():
    for number, values in enumerate(FACTORS.values()):
        assert {combination[number] for combination in CHOSEN} == set(values)


@pytest.mark.parametrize("values", CHOSEN, ids=str)
def test_no_operation_races(values):
    check_imitated(dict(zip(FACTORS, values, strict=True)))


def test_a_dry_run_ends_with_the_wait_that_is_missing(monkeypatch):
    values = (3, (2, None, 1), 1, "reduce", "none", "none", "bf16", "adamw", "--profile.check_streams=true")
    settings = settings_of(dict(zip(FACTORS, values, strict=True)))
    settings = replace(settings, dry_run=replace(settings.dry_run, world_size=2))
    dry_run(settings)
    monkeypatch.setattr(FlatParameters, "_wait_for_gathers", lambda _: None)
    with pytest.raises(StreamError, match="the computation must `wait` for the `Work` of that all_gather"):
        dry_run(settings)


@pytest.mark.full
@pytest.mark.parametrize("stage", FACTORS["stage"])
def test_no_operation_races_with_any_settings(stage):
    """All combinations but those of the last three factors, whose values take turns."""
    turns = itertools.cycle(itertools.product(*list(FACTORS.values())[-3:]))
    for values in itertools.product([stage], *list(FACTORS.values())[1:-3]):
        combination = dict(zip(FACTORS, (*values, *next(turns)), strict=True))
        if is_valid(combination):
            check_imitated(combination)


def check_saves(folder: Path) -> None:
    """Train on gloo, and save while training goes on."""
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    for stage, offload in ((1, "none"), (3, "auto")):
        values = (stage, (2, None, 1), 2, "reduce", "partition_host", offload, "bf16", "adamw", "")
        settings = settings_of(dict(zip(FACTORS, values, strict=True)))
        with streams_checked(world.device):
            mesh = build_mesh(settings, world)
            state = build(settings, mesh, world.device)
            micro_batches = blank_micro_batches(settings.train, settings.model.seq_length, mesh.data.size)
            saver = RunSaver(folder / f"{stage}-{offload}", state, kept=Kept(1), is_async=True)
            for step in range(2):
                train_step(state.model, state.optimizer, micro_batches, mesh)
                saver.start(Progress(step, step))
                train_step(state.model, state.optimizer, micro_batches, mesh)
                saver.wait()


class Branches(nn.Module):
    """A model that runs other blocks in each step, so that what is prefetched is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for number in ((0, 1, 2, 3), (0, 3), (3, 1))[step % 3]:
            x = self.blocks[number](x)
        return x


def groups_with_branches(config: ZeroConfig, offload: str) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    data = Mesh.create(tensor_size=1, shard_size=2, imitated_backend="nccl").data
    model = ZeroDataParallel(Branches(), data, config, offload=OffloadConfig(offload))
    return model, ZeroOptimizer(model, torch.optim.AdamW, fused=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_host_keeps_a_gradient_once_it_has_arrived(stage):
    """A second backward without `accumulate` adds to the mean of the first, which may be on its way to the host."""
    with imitated_world(3, 4, 4, "nccl") as world, streams_checked(world.device):
        model, optimizer = groups_with_branches(ZeroConfig(stage), "host")
        for _ in range(2):
            model(torch.ones(2, 8), 0).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("config", "offload"),
    [
        (ZeroConfig(3, optimizer_over="all"), "accelerator"),
        (ZeroConfig(3, optimizer_over="all"), "host"),
        (ZeroConfig(1, overlap_gather=True), "host"),
    ],
    ids=["between groups", "between groups, by the host", "to the accelerator"],
)
def test_weights_are_loaded_once_the_update_before_has_been_sent(config, offload):
    with imitated_world(3, 4, 4, "nccl") as world, streams_checked(world.device):
        model, optimizer = groups_with_branches(config, offload)
        for _ in range(2):
            model(torch.ones(2, 8), 0).square().mean().backward()
            optimizer.step()
            with model.loading_masters():
                for bucket in model.buckets:
                    bucket.master.zero_()


@pytest.mark.parametrize("config", [ZeroConfig(3, optimizer_over="all"), ZeroConfig(1, overlap_gather=True)], ids=str)
def test_the_host_may_read_and_write_states_that_it_stores(config):
    """A state dict is loaded in place; a save copies the states of the rank."""
    with imitated_world(3, 4, 4, "nccl") as world, streams_checked(world.device):
        model, optimizer = groups_with_branches(config, "host")
        copies = HostCopies(world.device)
        for saved in (optimizer, None):
            model(torch.ones(2, 8), 0).square().mean().backward()
            optimizer.step()
            announce_host_read(copies.take(RankState(model, saved).owned()).values())
            model(torch.ones(2, 8), 0).square().mean().backward()
            optimizer.step()
            model.state_dict()
            for bucket in model.buckets:
                bucket.master.zero_()


def test_saves_do_not_race(tmp_path):
    run_ranks(2, check_saves, tmp_path)
