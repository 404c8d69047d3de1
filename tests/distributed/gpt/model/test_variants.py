"""Models with the parts of every preset, and with each option by itself, train on any mesh as in one process."""

import itertools

import pytest
import torch
from torch import Tensor

from gpt.builder.train_state import build_model
from gpt.pretrained.tensors import load_weights
from parallel.mesh import Mesh
from tests.distributed.gpt.test_tensor_parallel import Result, assert_equals_whole, layout_of, train, train_whole
from tests.pairwise import noting, pairwise
from tests.ranks import run_cases, run_ranks
from tests.unit.gpt.model.models import ONE_DEVICE, SIZES, VARIANTS
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig

MESHES = [(1, 2, False), (1, 2, True), (1, 4, False), (1, 4, True), (2, 2, True), (2, 1, False)]
FACTORS = {
    "name": list(VARIANTS),
    "mesh": MESHES,  # data x tensor, sequence parallel
    "stage": [0, 1, 2, 3],
    "store": ["none", "selective", "keep"],
}
OFFLOADS = [NO_OFFLOAD, OffloadConfig("host")]
VOCABULARY = {"token_embedding.weight", "head.weight"}  # has a row for each word, and padding
Case = dict


def train_case(case: Case) -> Result:
    chosen = {"activations": ActivationsConfig(case["store"], 1), "offload": case["offload"]}
    return train(VARIANTS[case["name"]], *case["mesh"][1:], ZeroConfig(case["stage"], 5000), **chosen)


def check(cases: list[Case], num_ranks: int) -> None:
    """Check the cases whose meshes have this number of ranks."""
    chosen = [case for case in cases if case["mesh"][0] * case["mesh"][1] == num_ranks]
    for case, results in zip(chosen, run_cases(num_ranks, train_case, [[case] for case in chosen]), strict=True):
        data_size, tensor_size, _ = case["mesh"]
        with noting(case):
            assert_equals_whole(results, train_whole(VARIANTS[case["name"]], data_size), tensor_size)


def few_cases() -> list[Case]:
    """Return one case of each option and two of each preset; meshes, stages and stores take turns."""
    others = itertools.cycle(pairwise(stage=FACTORS["stage"], store=FACTORS["store"], offload=OFFLOADS))
    meshes = itertools.cycle(MESHES)
    return [{"name": name, "mesh": next(meshes), **next(others)} for name in [*VARIANTS, *SIZES] if name in VARIANTS]


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.full), 4])
def test_every_option_and_preset_equals_one_process(num_ranks):
    check(few_cases(), num_ranks)


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
    names, ids = ["rms", "llama", "qwen2", "qwen3", "mistral"], torch.arange(21).view(3, 7)
    weights = []
    for name in names:
        config = VARIANTS[name]
        generator = torch.Generator().manual_seed(0)
        model = build_model(config, ActivationsConfig(), ONE_DEVICE, torch.device("cpu"), torch.float64)
        shapes = {key: param.shape for key, param in model.named_parameters()}
        whole = {key: 0.3 * torch.randn(s, generator=generator, dtype=torch.float64) for key, s in shapes.items()}
        weights.append({key: w[: config.vocab_size] if key in VOCABULARY else w for key, w in whole.items()})
    (expected,) = run_ranks(1, logits_at, names, weights, ids)
    for tensor_size in (2, 4):
        for found in run_ranks(tensor_size, logits_at, names, weights, ids):
            for logits, whole in zip(found, expected, strict=True):
                torch.testing.assert_close(logits, whole, rtol=1e-10, atol=1e-10)
