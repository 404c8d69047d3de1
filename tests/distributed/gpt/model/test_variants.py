"""Models with the parts of every preset, and with each option by itself, train on any mesh as in one process."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpt.builder.train_state import TrainState, build_model
from gpt.checkpoint.checkpoint import load
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.saver import RunSaver
from gpt.model.compiled_blocks import compile_blocks
from gpt.model.transformer import initialize
from gpt.pretrained.tensors import load_weights
from gpt.shape.config import ModelConfig
from parallel.mesh import Mesh
from tests.distributed.gpt.test_checkpoint_layouts import logical
from tests.distributed.gpt.test_tensor_parallel import (
    NUM_STEPS,
    assert_equals_whole,
    batch,
    layout_of,
    train,
    train_whole,
)
from tests.distributed.zero.compiled.backend import Backend
from tests.pairwise import noting, pairwise
from tests.ranks import run_ranks
from tests.unit.gpt.model.models import ONE_DEVICE, SIZES, VARIANTS
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.engine import ZeroDataParallel
from zero.memory.placement import NO_OFFLOAD, OffloadConfig
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig

MESHES = [(1, 2, False), (1, 2, True), (1, 4, False), (1, 4, True), (2, 2, True), (2, 1, False)]
FACTORS = {
    "name": list(VARIANTS),
    "mesh": MESHES,  # data x tensor, sequence parallel
    "stage": [0, 1, 2, 3],
    "store": ["none", "selective", "keep"],
}
OFFLOADS = [NO_OFFLOAD, OffloadConfig("host")]
Case = dict


def train_all(cases: list[Case]) -> list:
    """Return the results of several cases on one rank; a start of the ranks serves all of them."""
    return [
        train(
            VARIANTS[case["name"]],
            case["mesh"][1],
            case["mesh"][2],
            ZeroConfig(case["stage"], 2000),
            activations=ActivationsConfig(case["store"], 1),
            offload=case["offload"],
        )
        for case in cases
    ]


def check(cases: list[Case]) -> None:
    """Check cases whose meshes have one number of ranks."""
    data_size, tensor_size, _ = cases[0]["mesh"]
    of_ranks = run_ranks(data_size * tensor_size, train_all, cases)
    for number, case in enumerate(cases):
        data_size, tensor_size, _ = case["mesh"]
        results = [of_rank[number] for of_rank in of_ranks]
        with noting(case):
            assert_equals_whole(results, train_whole(VARIANTS[case["name"]], data_size), tensor_size)


def by_num_ranks(cases: list[Case], num_ranks: int) -> list[Case]:
    return [case for case in cases if case["mesh"][0] * case["mesh"][1] == num_ranks]


def few_cases() -> list[Case]:
    """Return one case of each option and two of each preset; meshes, stages and stores take turns."""
    others = itertools.cycle(pairwise(stage=FACTORS["stage"], store=FACTORS["store"], offload=OFFLOADS))
    meshes = itertools.cycle(MESHES)
    return [{"name": name, "mesh": next(meshes), **next(others)} for name in [*VARIANTS, *SIZES] if name in VARIANTS]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_option_and_preset_equals_one_process(num_ranks):
    check(by_num_ranks(few_cases(), num_ranks))


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_option_and_preset_equals_one_process_in_every_layout(name, num_ranks):
    product = itertools.product(*({**FACTORS, "name": [name]}).values())
    cases = [dict(zip(FACTORS, values, strict=True)) for values in product]
    # With stage 3 both; below it they take turns.
    both = [{**case, "offload": offload} for case in cases if case["stage"] == 3 for offload in OFFLOADS]
    turns = zip((case for case in cases if case["stage"] < 3), itertools.cycle(OFFLOADS))
    check(by_num_ranks([*both, *({**case, "offload": offload} for case, offload in turns)], num_ranks))


def build_state(config: ModelConfig, tensor_size: int, stage: int) -> TrainState:
    torch.set_default_dtype(torch.float64)
    mesh, activations = Mesh.create(tensor_size), ActivationsConfig()
    gpt = build_model(config, activations, layout_of(mesh.tensor, False), torch.device("cpu"), torch.float64)
    initialize(gpt, seed=3)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(stage, 700))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, tensor=mesh.tensor, lr=1e-2, fused=True)
    return TrainState(mesh, model, optimizer, torch.device("cpu"), activations)


def continue_and_save(config: ModelConfig, tensor_size: int, stage: int, source: Path | None, folder: Path) -> float:
    """Load a checkpoint if there is one, save it again, and return the loss of a step."""
    state = build_state(config, tensor_size, stage)
    if source is None:
        state.model(*batch(config, 0, 0, 0)).backward()
        state.optimizer.step()
    else:
        load(source, state)
    saver = RunSaver(folder, state, keep=9, is_async=False)
    saver.start(Progress(1, 2))
    saver.wait()
    loss = state.model(*batch(config, 1, 0, 0))
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("name", ["qwen3"])
def test_checkpoints_are_read_at_sizes_that_split_keys_and_values_and_that_replicate_them(name, tmp_path):
    config, source, losses, saved = VARIANTS[name], None, [], []
    for number, (tensor_size, stage) in enumerate([(1, 1), (4, 3), (2, 2), (4, 1), (1, 0)]):
        folder = tmp_path / str(number)
        losses += run_ranks(tensor_size, continue_and_save, config, tensor_size, stage, source, folder)[:1]
        source = folder / "step-00000001"
        saved.append(logical(source))
        assert saved[-1].keys() == saved[0].keys()
        assert all(saved[-1][key].equal(saved[0][key]) for key in saved[0])
    assert losses == pytest.approx(losses[:1] * len(losses), abs=1e-12)


def logits_at(sizes: list[str], weights: list[dict[str, Tensor]], ids: Tensor) -> list[Tensor]:
    torch.set_default_dtype(torch.float64)
    axis = Mesh.create(torch.distributed.get_world_size()).tensor
    found = []
    for name, whole in zip(sizes, weights, strict=True):
        for is_split in (False, True):
            tokens = layout_of(axis, is_split)
            model = build_model(VARIANTS[name], ActivationsConfig(), tokens, torch.device("cpu"), torch.float64).eval()
            load_weights(model, whole)
            found.append(model(ids).detach())
    return found


def test_weights_give_the_same_logits_at_any_tensor_size():
    names, ids = ["llama", "qwen3", "mistral"], torch.arange(21).view(3, 7)
    weights = []
    for name in names:
        config = VARIANTS[name]
        generator = torch.Generator().manual_seed(0)
        model = build_model(config, ActivationsConfig(), ONE_DEVICE, torch.device("cpu"), torch.float64)
        shapes = {key: param.shape for key, param in model.named_parameters()}
        whole = {key: 0.3 * torch.randn(s, generator=generator, dtype=torch.float64) for key, s in shapes.items()}
        weights.append({key: w[: config.vocab_size] if w.shape[0] == 128 else w for key, w in whole.items()})
    (expected,) = run_ranks(1, logits_at, names, weights, ids)
    for tensor_size in (2, 4):
        for found in run_ranks(tensor_size, logits_at, names, weights, ids):
            for logits, whole in zip(found, expected, strict=True):
                torch.testing.assert_close(logits, whole, rtol=1e-10, atol=1e-10)


def losses_of_blocks(config: ModelConfig, tensor_size: int, is_split: bool, is_compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    mesh = Mesh.create(tensor_size)
    tokens, activations = layout_of(mesh.tensor, is_split), ActivationsConfig("keep", 1)
    gpt = build_model(config, activations, tokens, torch.device("cpu"), torch.float64, is_compiled=is_compiled)
    initialize(gpt, seed=0)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(3, bucket_numel=500))
    if is_compiled:
        compile_blocks(gpt, activations.recomputes, Backend("aot_eager_default_partitioner"))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, tensor=mesh.tensor, lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(*batch(config, step, 0, mesh.data.rank))
        loss.backward()
        losses += [loss.detach(), optimizer.step()]
    return losses


def check_compiled(names: list[str], tensor_size: int) -> None:
    for name, is_split in itertools.product(names, [False, True]):
        eager, compiled = (losses_of_blocks(VARIANTS[name], tensor_size, is_split, flag) for flag in (False, True))
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12, msg=f"{name} {is_split}")


def test_compiled_blocks_equal_eager_ones():
    run_ranks(2, check_compiled, ["mistral"], 2)


@pytest.mark.full
@pytest.mark.parametrize("tensor_size", [1, 2])
def test_all_compiled_blocks_equal_eager_ones(tensor_size):
    run_ranks(2, check_compiled, list(VARIANTS), tensor_size, timeout_seconds=1800)
