"""Weights gathered in FP8: bits and states as with gathers in bf16, half the bytes, and exact values to be read."""

import itertools
from contextlib import suppress
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import zero.fp8
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from tests.checked_streams import run_checked
from tests.pairwise import pairwise
from tests.ranks import call_with, run_cases, run_ranks
from zero.checkpoint.export import full_state_dict
from zero.checkpoint.folders.state import DistributedState
from zero.core.partition.stage import Lifetime
from zero.data_parallel import ZeroDataParallel
from zero.formulas.traffic import axis_bytes
from zero.optimizer import ZeroOptimizer
from zero.settings.config import OffloadConfig, ZeroConfig

WIDTH = 144  # more than a block of 128, and no multiple of it
BUCKET_NUMEL = 10_000  # shards begin inside rows
FACTORS = {
    "stage": [1, 2, 3],
    "ranks": [(2, None, "group"), (4, 2, "all")],
    "recipe": ["tensorwise", "blockwise"],
    "offload": ["accelerator", "host"],
    "overlap_gather": [False, True],
}
LAYOUTS = pairwise(**FACTORS)


class Chain(nn.Module):
    """Blocks of a linear layer in FP8, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def train(layout: dict[str, Any], gather_dtype: Literal["fp8"] | None) -> dict[str, Any]:
    """Train two steps of two micro-batches, write some weights, train on; return what was seen."""
    stage, (_, group_size, over), recipe, mode, overlap = layout.values()
    torch.manual_seed(0)
    mesh = Mesh.create(tensor_size=1, shard_size=group_size)
    mesh.log.keeps_events = True
    module = Chain().bfloat16()
    zero.fp8.convert(module, recipe)
    config = ZeroConfig(stage, BUCKET_NUMEL, overlap_gather=overlap, optimizer_over=over, gather_dtype=gather_dtype)
    model = ZeroDataParallel(module, mesh.data, config, offload=OffloadConfig(mode))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    losses = []

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + mesh.data.rank)
        for micro_batch in range(2):
            x = torch.randn(6, WIDTH, generator=generator).bfloat16()
            loss = model(x).float().square().mean()
            if micro_batch == 0:
                with model.accumulate():
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.item())
        optimizer.step()

    step(0)
    step(1)
    model.wait_for_updates()
    persistent = [flat for flat in model.flats if flat.lifetime is Lifetime.PERSISTENT]
    compared = {span.name: flat.as_sent(span.elements).clone() for flat in persistent for span in flat.layout.spans}
    with model.gathered() as whole:
        seen = {name: param.detach().clone() for name, param in whole.named_parameters()}
        with torch.no_grad():
            whole.blocks[0][1].weight.mul_(1.7)  # all ranks write, to values above the largest ones of before
    with model.gathered([module.blocks[1][1].weight], modify=True), torch.no_grad():
        module.blocks[1][1].weight.add_(0.3 if mesh.data.rank == 0 else torch.nan)
    step(2)  # from here on the order of the units is known again
    mesh.log.clear()
    step(3)
    wire_bytes = sum(
        event.wire_bytes for event in mesh.log.events if event.message_bytes > 100
    )  # no scalars, no scales
    mesh.barrier()
    numels = [(flat, flat.layout.numel) for flat in model.flats]
    in_fp8 = sum(numel for flat, numel in numels if flat.transport.is_lossy)
    kept = [(flat, numel) for flat, numel in numels if flat in [*model.flats][-2:]]  # of the last block
    return {
        "losses": losses,
        "compared": compared,
        "seen": seen,
        "states": full_state_dict(model, masters=True),
        "wire_bytes": wire_bytes,
        "numel": sum(numel for _, numel in numels),
        "in_fp8": in_fp8,
        "kept_bytes": sum(numel * (1 if flat.transport.is_lossy else 2) for flat, numel in kept),
        "unwrapped": {name: param.detach() for name, param in model.unwrap().named_parameters()},
    }


@cache
def trained() -> dict[tuple, list[dict[str, Any]]]:
    found: dict[tuple, list[dict[str, Any]]] = {}
    for num_ranks in (2, 4):
        cases = [
            (layout, gather_dtype)
            for layout, gather_dtype in itertools.product(LAYOUTS, (None, "fp8"))
            if layout["ranks"][0] == num_ranks
        ]
        for (layout, gather_dtype), result in zip(cases, run_cases(num_ranks, train, cases), strict=True):
            found[(*layout.values(), gather_dtype)] = result
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_gathers_in_fp8_change_no_bit_and_no_value_that_is_read(layout):
    exact, coded = (trained()[(*layout.values(), gather_dtype)] for gather_dtype in (None, "fp8"))
    for before, after in zip(exact, coded, strict=True):
        assert after["losses"] == before["losses"]
        for kind in ("seen", "states", "unwrapped"):
            for name, values in before[kind].items():
                assert after[kind][name].equal(values), (kind, name)


def test_replicas_compare_what_was_sent():
    """A rank has exact values of its own shard."""
    for layout in LAYOUTS:
        first, *others = (rank["compared"] for rank in trained()[(*layout.values(), "fp8")])
        assert bool(first) == (layout["stage"] < 3)
        assert all(values.equal(other[name]) for other in others for name, values in first.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_a_weight_is_sent_as_one_byte(layout):
    """Stage 3 sends 4 bytes a parameter and micro-batch instead of 6: two gathers of one, a reduction of two."""
    stage, (num_ranks, group_size, over), *_ = layout.values()
    policy, inner = ZeroConfig(stage, optimizer_over=over).policy, group_size or num_ranks
    for found in trained()[(*layout.values(), "fp8")]:
        numel, in_fp8 = found["numel"], found["in_fp8"]
        assert in_fp8 >= 3 * WIDTH**2
        reduced = 2 * numel if policy.full_grads is Lifetime.TRANSIENT else 4 * numel
        expected = axis_bytes(
            policy,
            (2 * numel - in_fp8, 2 * numel),
            (inner, num_ranks // inner),
            2,
            gradient_bytes=(reduced, reduced),
            kept_bytes=found["kept_bytes"],
        )
        assert found["wire_bytes"] == pytest.approx(sum(expected), rel=0.02)


def test_codes_are_not_read_before_they_have_arrived():
    overlapped = [layout for layout in LAYOUTS if layout["ranks"][0] == 2 and layout["overlap_gather"]]
    run_checked(2, call_with, train, [(layout, "fp8") for layout in overlapped])


@pytest.mark.parametrize(
    ("recipe", "named"), [("rowwise", "quantize a weight and its transpose apart"), (None, "reads no weight in FP8")]
)
def test_weights_that_cannot_be_sent_in_fp8_are_refused(recipe, named):
    module = Chain()
    if recipe is not None:
        zero.fp8.convert(module, recipe)
    with pytest.raises(ConfigError, match=rf"gather_dtype=fp8.*{named}"):
        ZeroDataParallel(module, Mesh.create(tensor_size=1).data, ZeroConfig(3, gather_dtype="fp8"))


def read_after_loading() -> list[int]:
    """Return the bytes that a read after a step gathers again, and after loading a state."""
    mesh = Mesh.create(tensor_size=1)
    mesh.log.keeps_events = True
    module = Chain().bfloat16()
    zero.fp8.convert(module)
    model = ZeroDataParallel(module, mesh.data, ZeroConfig(1, BUCKET_NUMEL, gather_dtype="fp8"))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    state, found = DistributedState(model, optimizer), []
    for loads in (False, True):
        model(torch.ones(2, WIDTH).bfloat16()).sum().backward()
        optimizer.step()
        if loads:
            state.load_state_dict(state.state_dict())
        mesh.log.clear()
        with model.gathered():
            pass
        found.append(sum(event.wire_bytes for event in mesh.log.events if event.message_bytes > 100))  # no scales
    return found


def test_what_was_loaded_is_exact():
    for after_step, after_loading in run_ranks(2, read_after_loading):
        assert after_step >= 3 * WIDTH**2
        assert after_loading == 0


def write_elsewhere() -> list[str]:
    """Write a weight in a forward, then in `gathered()` on ranks of which one raises, and train on."""
    module = Chain().bfloat16()
    zero.fp8.convert(module)
    model = ZeroDataParallel(module, Mesh.create(tensor_size=1).data, ZeroConfig(3, BUCKET_NUMEL, gather_dtype="fp8"))
    weight, x = module.blocks[0][1].weight, torch.ones(2, WIDTH).bfloat16()
    found = []
    with torch.no_grad():
        handle = module.blocks[0][1].register_forward_pre_hook(lambda *_: weight.mul_(8))
        try:
            model(x)
        except RuntimeError as error:
            found.append(str(error))
        handle.remove()
    with suppress(KeyError), model.gathered(), torch.no_grad():
        weight.fill_(3.0)
        if model.data.rank == 0:
            raise KeyError
    found.append(str(model(x).abs().max().item()))
    return found


def test_a_write_with_scales_that_nobody_knows_raises_and_one_that_fails_is_measured():
    first, second = run_ranks(2, write_elsewhere)
    assert "blocks.0.1.weight" in first[0]
    assert first == second
