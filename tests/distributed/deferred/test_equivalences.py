"""Every stage trains as one process does if collectives and copies run as late as the program allows."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from gpt.builder.train_state import TrainState, parameter_groups
from gpt.checkpoint.checkpoint import RunSaver, rank_state
from gpt.checkpoint.folder import Kept
from gpt.checkpoint.layout import Progress
from gpt.model.compiled_blocks import compile_blocks
from gpt.shape.config import ModelConfig
from lab.observe.memory_tracker import MemoryTracker
from parallel.mesh import Mesh
from parallel.tensor.split_parameters import split_dims
from tests.deferred import deferred
from tests.distributed.gpt.test_tensor_parallel import (
    ADAMW,
    CLIP_NORM,
    Result,
    assert_equals_whole,
    build,
    config_of,
    layout_of,
    train_steps,
    train_whole,
)
from tests.distributed.zero.compiled.backend import Backend
from tests.pairwise import noting, product_of
from tests.ranks import run_cases
from tests.simulated_streams import Streams
from tests.twins import params_of
from tests.unit.zero.state.test_writer import LateThread
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.engine import ZeroDataParallel
from zero.memory.placement import NO_OFFLOAD, OffloadConfig
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig
from zero.state.saved_state import rank_file
from zero.state.tensor_file import TensorFile

CPU = torch.device("cpu")
NUM_STEPS = 3  # Gemini places buckets anew in the third
CHUNK = 4000 / 2**20


def auto(budget_gb: float) -> OffloadConfig:
    return OffloadConfig(
        "auto", accelerator_memory_gb=budget_gb, hidden_dim=32, min_chunk_size_m=CHUNK, search_range_m=CHUNK
    )


# Of two ranks, "auto" has room for some optimizer states at stage 2, and for some shards at stage 3; "more" for all
# of both.
OFFLOADS = {"none": NO_OFFLOAD, "host": OffloadConfig("host"), "auto": auto(1.2e-3), "more": auto(2e-3)}


@dataclass(frozen=True)
class Case:
    """The settings of a run."""

    stage: int
    tensor_size: int = 1
    shard_size: int | None = None
    optimizer_over: str = "group"
    num_micro_batches: int = 2
    accumulate: str = "reduce"
    overlap: bool = True
    overlap_gather: bool = False
    is_split: bool = False
    store: str = "none"
    offload: str = "none"
    is_compiled: bool = False

    @property
    def model(self) -> ModelConfig:
        # Stores pass checkpoints through two buffers: more than two layers use one of them again.
        return config_of(97, num_layers=4 if "partition" in self.store else 2)

    @property
    def zero(self) -> ZeroConfig:
        ways = {"overlap_gather": self.overlap_gather, "accumulate": self.accumulate, "prefetch_numel": 30_000}
        return ZeroConfig(self.stage, 4000, self.overlap, optimizer_over=self.optimizer_over, **ways)

    @property
    def activations(self) -> ActivationsConfig:
        return ActivationsConfig(self.store, defragment=self.stage % 2 == 0)


def start(case: Case) -> TrainState:
    mesh = Mesh.create(case.tensor_size, shard_size=case.shard_size)
    gpt = build(case.model, layout_of(mesh.tensor, case.is_split), case.activations)
    model = ZeroDataParallel(gpt, mesh.data, case.zero, offload=OFFLOADS[case.offload])
    if case.is_compiled:
        compile_blocks(gpt, case.activations.recomputes, Backend())
    groups, settings = parameter_groups(gpt, ADAMW), {"clip_norm": CLIP_NORM, "lr": ADAMW.lr, "fused": True}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, groups, tensor=mesh.tensor, **settings)
    return TrainState(mesh, model, optimizer, CPU, case.activations)


def train(state: TrainState, case: Case) -> Iterator[tuple[float, float]]:
    """Yield the loss and the norm of each step."""
    return train_steps(case.model, state.mesh, state.model, state.optimizer, case.num_micro_batches, NUM_STEPS)


def train_late(case: Case) -> tuple[Result, int]:
    """Train under deferred execution; return the result and the number of pieces of work that were deferred."""
    with ExitStack() as contexts:
        if OFFLOADS[case.offload].mode == "auto":  # the planner measures memory
            contexts.enter_context(MemoryTracker(CPU))
        streams: Streams = contexts.enter_context(deferred())
        state = start(case)
        losses, norms = zip(*train(state, case), strict=True)
        params = params_of(state.model)
    return Result(list(losses), list(norms), params, split_dims(state.model.module)), streams.num_launched


def check_equal_one_process(num_ranks: int, cases: list[Case]) -> None:
    for case, of_ranks in zip(cases, run_cases(num_ranks, train_late, [[case] for case in cases]), strict=True):
        expected = train_whole(case.model, num_ranks // case.tensor_size, case.num_micro_batches, NUM_STEPS)
        with noting(case):
            assert_equals_whole([result for result, _ in of_ranks], expected, case.tensor_size)
        assert all(num_deferred for _, num_deferred in of_ranks)


FEW = {
    2: [
        Case(0, offload="host", num_micro_batches=1),
        Case(1, store="partition_host", overlap_gather=True),
        Case(2, offload="host", store="partition_host", overlap=False),
        Case(2, offload="host", overlap_gather=True),
        Case(3, offload="host"),
        Case(3, offload="auto", num_micro_batches=1),
        Case(3, offload="more", num_micro_batches=1),
    ],
    4: [
        Case(1, tensor_size=2, is_split=True, is_compiled=True, num_micro_batches=1, overlap_gather=True),
        Case(2, shard_size=2),
        Case(3, shard_size=2, accumulate="local"),
        Case(2, shard_size=2, optimizer_over="all", overlap_gather=True),
        Case(3, shard_size=2, optimizer_over="all", offload="host"),
        Case(3, shard_size=1, optimizer_over="all", num_micro_batches=1),
        Case(3, shard_size=2, optimizer_over="all"),
        Case(3, tensor_size=2, store="partition_host", num_micro_batches=1),
    ],
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_late_collectives_and_copies_change_nothing(num_ranks: int):
    check_equal_one_process(num_ranks, FEW[num_ranks])


FACTORS = {
    # ranks of data, of tensor, and of a shard group
    "sizes": [(4, 1, None), (4, 1, 2), (2, 2, None), (2, 1, None), (4, 1, 1), (1, 2, None)],
    "stage": [0, 1, 2, 3],
    "optimizer_over": ["group", "all"],
    "num_micro_batches": [1, 3],
    "accumulate": ["reduce", "local"],
    "overlap": [True, False],
    "overlap_gather": [True, False],
    "is_split": [False, True],
    "store": ["none", "keep", "partition", "partition_host", "selective"],
    "offload": ["none", "host", "auto", "more"],
    "is_compiled": [False, True],
}
NUM_SAMPLED = 60  # configurations of each size


def is_possible(combination: dict) -> bool:
    (data_size, tensor_size, _), is_auto = combination["sizes"], combination["offload"] in ("auto", "more")
    if combination["store"] == "partition" and (tensor_size == 1 or combination["is_split"]):
        return False
    return not is_auto or (data_size == 2 and tensor_size == 1 and combination["stage"] >= 2)


@pytest.mark.full
@pytest.mark.parametrize("sizes", FACTORS["sizes"], ids=str)
def test_late_collectives_and_copies_change_nothing_in_many_configurations(sizes: tuple[int, int, int | None]):
    """The whole product would take hours."""
    data_size, tensor_size, shard_size = sizes
    possible = list(filter(is_possible, product_of(FACTORS | {"sizes": [sizes]}, *FACTORS)))
    cases = []
    for combination in random.Random(0).sample(possible, NUM_SAMPLED):
        settings = {name: value for name, value in combination.items() if name != "sizes"}
        cases.append(Case(**settings, tensor_size=tensor_size, shard_size=shard_size))
    check_equal_one_process(data_size * tensor_size, cases)


def save_while_training(folder: Path, stage: int, offload: str) -> bool:
    """Save after two steps while the third runs; return whether the file holds the state after two steps."""
    case = Case(stage, offload=offload, num_micro_batches=1)
    with deferred(), mock.patch("zero.state.writer.threading.Thread", LateThread):
        state = start(case)
        steps = train(state, case)
        next(steps), next(steps)
        expected = {name: tensor.detach().clone() for name, tensor in rank_state(state).tensors().items()}
        saver = RunSaver(folder, state, kept=Kept(1), is_async=True)
        saver.start(Progress(2, 2))
        next(steps)
        saved = saver.wait()
        for _ in steps:
            pass
    file = TensorFile(rank_file(saved, state.mesh.rank))
    assert file.entries.keys() == expected.keys()
    return all(file.tensor(name).equal(tensor) for name, tensor in expected.items())


def test_late_copies_of_an_asynchronous_save_hold_the_state_of_their_step(tmp_path: Path):
    cases = [(tmp_path / "1", 1, "none"), (tmp_path / "3", 3, "host")]
    assert run_cases(2, save_while_training, cases) == [[True, True]] * 2
