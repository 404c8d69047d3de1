"""Units that are unsharded and resharded (stage 3): what is in memory at each moment, and that no weights are stale."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel.mesh import Mesh
from tests.models import batch, build, loss_of
from tests.ranks import run_cases, run_ranks
from tests.twins import Twins, next_token_loss
from zero.data_parallel import ZeroDataParallel
from zero.settings.config import ZeroConfig

NUM_BLOCKS, BLOCK_NUMEL = 5, 288  # with padding
STAGE_3 = ZeroConfig(stage=3, bucket_numel=500, prefetch_numel=BLOCK_NUMEL)


class NotingBlock(nn.Module):
    """A block that calls `note` in the middle of its forward and of its backward."""

    def __init__(self, index: int, notes: dict[str, set[int]]):
        super().__init__()
        self.index, self.notes, self.linear = index, notes, nn.Linear(16, 16)
        self.in_memory = set

    def note(self, direction: str) -> None:
        self.notes[f"{direction} {self.index}"] = self.in_memory()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.note("forward")
        if x.requires_grad:
            x.register_hook(lambda _grad: self.note("backward"))
        return x.tanh()


class Chain(nn.Module):
    """A chain of blocks; `per_checkpoint` of them are recomputed at a time, if it is given."""

    def __init__(self, notes: dict[str, set[int]], per_checkpoint: int | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(NotingBlock(index, notes) for index in range(NUM_BLOCKS))
        self.per_checkpoint = per_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        if self.per_checkpoint is None:
            return self.run(list(self.blocks), x).sum()
        for start in range(0, NUM_BLOCKS, self.per_checkpoint):
            blocks = list(self.blocks)[start : start + self.per_checkpoint]
            x = checkpoint(self.run, blocks, x, use_reentrant=False)
        return x.sum()

    def run(self, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x


def units_in_memory(num_ahead: int, per_checkpoint: int | None = None) -> dict[str, set[int]]:
    """Return which blocks' full parameters are allocated, gathered or not yet, at every point of the third step."""
    notes: dict[str, set[int]] = {}
    module = Chain(notes, per_checkpoint)
    config = replace(STAGE_3, prefetch_numel=num_ahead * BLOCK_NUMEL)
    model = ZeroDataParallel(module, Mesh.create(tensor_size=1).data, config)

    def in_memory() -> set[int]:
        return {index for index, flat in enumerate(model.flats) if flat.full.untyped_storage().nbytes()}

    for block in module.blocks:
        block.in_memory = in_memory
    for _ in range(3):
        model(torch.ones(2, 16)).backward()
        notes["after backward"] = in_memory()
    with torch.no_grad():
        model(torch.ones(2, 16))
    return notes | {"after evaluation": in_memory()}


def test_only_a_unit_and_the_prefetched_ones_are_in_memory():
    blocks = range(NUM_BLOCKS)
    for num_ahead, found in enumerate(run_cases(2, units_in_memory, [(0,), (1,), (2,)])):
        expected = {f"forward {index}": set(blocks[index : index + 1 + num_ahead]) for index in blocks}
        expected |= {f"backward {index}": set(blocks[max(0, index - num_ahead) : index + 1]) for index in blocks}
        expected |= {"after backward": set(), "after evaluation": set()}
        assert found == [expected, expected]


def test_no_more_than_one_checkpoint_and_the_prefetched_units_are_in_memory():
    cases = list(itertools.product((0, 1), (1, 2, 3)))
    for (num_ahead, per_checkpoint), found in zip(cases, run_cases(2, units_in_memory, cases), strict=True):
        for notes in found:
            assert all(index in notes[f"forward {index}"] & notes[f"backward {index}"] for index in range(NUM_BLOCKS))
            assert max(map(len, notes.values())) <= per_checkpoint + num_ahead
            assert notes["after backward"] == notes["after evaluation"] == set()


def check_step_while_gathered() -> None:
    twins = Twins(build("toy"), STAGE_3, lr=1e-2)
    for step in range(2):
        twins.backward(step)
        with twins.model.gathered():
            twins.step()


def test_unsharded_weights_are_never_stale():
    run_ranks(2, check_step_while_gathered)


def check_launches_return_to_their_order() -> None:
    """Run a forward without a backward: the next backward closes units late, and the one after it as usual."""
    mesh = Mesh.create(tensor_size=1)
    mesh.log.keeps_events = True
    model = ZeroDataParallel(build("toy"), mesh.data, STAGE_3)

    def ops_of_backward() -> list[str]:
        loss = next_token_loss(model, 0, 0)
        mesh.log.clear()
        loss.backward()
        model.before_step(())
        model.reducer.clear()
        return [event.op for event in mesh.log.events if event.phase != "agreement"]

    ops_of_backward()
    usual = ops_of_backward()
    loss_of(model, batch(1, 0, 0))
    late = ops_of_backward()
    assert Counter(late) == Counter(usual)
    assert late != usual
    assert ops_of_backward() == usual


def test_a_forward_without_backward_delays_the_reductions_of_one_step_only():
    run_ranks(2, check_launches_return_to_their_order)
