"""Every layout reads what any other has written: the logical tensors are equal."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from gpt.builder.train_state import TrainState
from gpt.checkpoint.checkpoint import RunSaver, load
from gpt.checkpoint.folder import Kept
from gpt.checkpoint.layout import Progress, read_run
from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from parallel.mesh import Mesh
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens
from tests.ranks import run_ranks
from tests.unit.gpt.model.models import VARIANTS
from zero.activations.checkpointed_blocks import ActivationsConfig, checkpointed_blocks
from zero.checkpoint.saved_state import SavedState
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig

CONFIG = ModelConfig(2, 32, 4, 12, 97, dropout=0.0)
GLOBAL_BATCH = 4  # sequences, divided over the data-parallel ranks


@dataclass(frozen=True)
class LayoutCase:
    """The layout of a run on data x tensor ranks."""

    stage: int
    data: int = 1
    tensor: int = 1
    is_split: bool = False
    bucket_numel: int | None = 4000
    shard_size: int | None = None
    optimizer_over: Literal["group", "all"] = "group"
    resident_numel: int = 0
    units: tuple[str, ...] | None = None
    offload: OffloadConfig = NO_OFFLOAD
    model: ModelConfig = CONFIG

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor


def build(case: LayoutCase) -> TrainState:
    torch.set_default_dtype(torch.float64)
    mesh = Mesh.create(case.tensor, shard_size=case.shard_size)
    tokens = SplitTokens(mesh.tensor) if case.is_split else ReplicatedTokens(mesh.tensor)
    gpt = GPT(case.model, tokens, checkpointed_blocks(ActivationsConfig()))
    initialize(gpt, seed=3)
    settings = {"optimizer_over": case.optimizer_over, "resident_numel": case.resident_numel, "units": case.units}
    zero = ZeroConfig(case.stage, case.bucket_numel, **settings)
    model = ZeroDataParallel(gpt, mesh.data, zero, offload=case.offload)
    matrices = [param for param in gpt.parameters() if param.dim() > 1]
    rest = [param for param in gpt.parameters() if param.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, groups, tensor=mesh.tensor, clip_norm=0.5, lr=1e-2, fused=True)
    return TrainState(mesh, model, optimizer, torch.device("cpu"), ActivationsConfig())


def train(state: TrainState, first: int, num_steps: int) -> list[float]:
    """Return the losses of the global batches, whose sequences do not depend on the layout."""
    losses = []
    for step in range(first, first + num_steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(CONFIG.vocab_size, (GLOBAL_BATCH, CONFIG.seq_length + 1), generator=generator)
        own = ids.chunk(state.mesh.data.size)[state.mesh.data.rank]
        loss = state.model(own[:, :-1], own[:, 1:])
        loss.backward()
        state.optimizer.step()
        total = loss.detach() / state.mesh.data.size
        state.mesh.data.all_reduce(total, out=total).wait()
        losses.append(total.item())
    return losses


def save(state: TrainState, folder: Path, step: int, *, is_async: bool = False) -> Path:
    saver = RunSaver(folder, state, kept=Kept(9), is_async=is_async)
    saver.start(Progress(step, step * GLOBAL_BATCH))
    found = saver.wait()
    assert found is not None
    return found


def train_and_save(case: LayoutCase, folder: Path, num_steps: int) -> None:
    state = build(case)
    train(state, 0, num_steps)
    save(state, folder, num_steps)


def load_and_save(cases: list[LayoutCase], source: Path, folder: Path) -> None:
    for number, case in enumerate(cases):
        state = build(case)
        assert load(source, state) == Progress(2, 2 * GLOBAL_BATCH)
        save(state, folder / f"{case.data}-{case.tensor}-{number}", 2, is_async=bool(number % 2))


def load_and_train(case: LayoutCase, source: Path, num_steps: int) -> list[float]:
    state = build(case)
    progress = load(source, state)
    return train(state, progress.step, num_steps)


def logical(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, in its full shape, by name and kind."""
    saved = SavedState(folder, read_run(folder).layout["state"])
    found = {}
    for name in saved.parameters:
        for kind in ["master", *saved.state_kinds(name)]:
            scalar = saved.scalar(name, kind) if kind != "master" else None
            found[f"{kind} of {name}"] = saved.whole(name, kind) if scalar is None else scalar
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of one process after two steps."""
    folder = tmp_path_factory.mktemp("reference")
    run_ranks(1, train_and_save, LayoutCase(0), folder, 2)
    return folder / "step-00000002"


def assert_one_logical_form(cases: list[LayoutCase], source: Path, folder: Path) -> None:
    expected = logical(source)
    assert {name.split()[0] for name in expected} == {"master", "exp_avg", "exp_avg_sq", "step"}
    run_ranks(cases[0].num_ranks, load_and_save, cases, source, folder)
    for number, case in enumerate(cases):
        found = logical(folder / f"{case.data}-{case.tensor}-{number}" / "step-00000002")
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name].dtype == expected[name].dtype
            assert found[name].shape == expected[name].shape, f"{name} at {case}"
            assert found[name].equal(expected[name]), f"{name} at {case}"


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_every_layout_loads_and_saves_one_logical_form(reference, tmp_path, data, tensor):
    cases = [LayoutCase(stage, data, tensor, is_split=tensor > 1 and stage % 2 == 1) for stage in range(4)]
    assert_one_logical_form(cases, reference, tmp_path)


def test_other_buckets_units_placements_and_groups_of_shards_are_read_too(reference, tmp_path):
    cases = [
        LayoutCase(2, 4, bucket_numel=None),
        LayoutCase(3, 4, bucket_numel=130, resident_numel=100),
        LayoutCase(3, 4, units=("blocks.*.attention", "blocks.*.mlp")),
        LayoutCase(3, 4, shard_size=2),
        LayoutCase(2, 4, shard_size=2, optimizer_over="all"),
        LayoutCase(3, 4, shard_size=2, optimizer_over="all", offload=OffloadConfig("host")),
        LayoutCase(1, 4, offload=OffloadConfig("host")),
        LayoutCase(3, 4, offload=OffloadConfig("host")),
    ]
    assert_one_logical_form(cases, reference, tmp_path)


def test_keys_and_values_that_ranks_split_or_replicate_have_one_logical_form(tmp_path):
    of_four = LayoutCase(3, 1, 4, model=VARIANTS["qwen3"])  # two heads of keys and values
    run_ranks(4, train_and_save, of_four, tmp_path, 2)
    for tensor in (1, 2, 4):
        case = LayoutCase(tensor % 3, 1, tensor, model=of_four.model)
        assert_one_logical_form([case], tmp_path / "step-00000002", tmp_path)
