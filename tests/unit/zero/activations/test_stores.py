"""Stores of activation checkpoints: bytes that they keep, order of their copies, and settings that are refused."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from lab.observe.memory_tracker import MemoryTracker
from parallel.memory_kinds import TensorKind
from parallel.mesh import Axis, Mesh, Work
from parallel.tensor.blocks import run_in_order
from tests.ranks import run_cases
from zero.activations.checkpointed_blocks import ActivationsConfig, CheckpointedBlocks, checkpointed_blocks
from zero.activations.stores import STORES, Slot, StoredBytes, make_store, stored_bytes
from zero.core.memory.streams import SideStream

CPU = torch.device("cpu")
Block = Callable[[Tensor], Tensor]


def blocks(num_blocks: int) -> list[Block]:
    """Return blocks that each save their input for backward, and all compute something else."""
    return [lambda x, factor=factor: (x * x.sigmoid() * factor).cos() for factor in range(1, num_blocks + 1)]


def gradient_of(x: Tensor, run: Callable[[list[Block], Tensor], Tensor], num_blocks: int = 5) -> Tensor:
    x = x.clone().requires_grad_()
    run(blocks(num_blocks), x * 1).sum().backward()
    return x.grad


SHAPES = [(4, 6), (5, 3), (7,), (1,), (2, 3, 5), (1, 1)]


def activation(seed: int) -> Tensor:
    dtype = (torch.float64, torch.bfloat16, torch.float32)[seed % 3]
    return torch.randn(SHAPES[seed], generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def partitioned_gradients(store: str, defragment: bool) -> list[tuple[Tensor, StoredBytes]]:
    """Return for every shape the gradient, and the bytes that are kept, which must be those that the store promises."""
    axis = Mesh.create(torch.distributed.get_world_size()).tensor
    found = []
    for seed in range(len(SHAPES)):
        x = activation(seed)
        run = checkpointed_blocks(ActivationsConfig(store, 2, defragment), axis)
        with MemoryTracker(CPU) as tracker:
            y = run(blocks(5), x.requires_grad_() * 1)
            kept = StoredBytes(
                tracker.device.resident[TensorKind.CHECKPOINTS], tracker.host.resident[TensorKind.CHECKPOINTS]
            )
            y.sum().backward()
            in_transit = tracker.device.peak[TensorKind.BUFFERS] if defragment else 0
        promised = stored_bytes(store, 3, x.numel(), x.element_size(), axis.size)
        assert kept == replace(promised, in_transit=0)
        assert in_transit == (promised.in_transit if defragment else 0)
        found.append((x.grad, kept))
    return found


def test_any_shape_is_partitioned_to_one_part_a_rank():
    cases = list(itertools.product(("partition", "partition_host"), (True, False)))
    for (store, _), of_ranks in zip(cases, run_cases(3, partitioned_gradients, cases), strict=True):
        for seed, (gradient, kept) in itertools.chain(*map(enumerate, of_ranks)):
            x = activation(seed)
            assert gradient.equal(gradient_of(x, run_in_order))
            part_bytes = 3 * math.ceil(x.numel() / 3) * x.element_size()
            assert kept == (StoredBytes(device=part_bytes) if store == "partition" else StoredBytes(host=part_bytes))


def run_with(store: object, layers_per_checkpoint: int = 1, reuses_memory: bool = False) -> CheckpointedBlocks:
    return CheckpointedBlocks(store, layers_per_checkpoint, SideStream(CPU), reuses_memory)


class LoggingStore:
    """A store that logs its calls; the values that `take` returns are valid only after the wait for its `Work`."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def put(self, slot: Slot, activation: Tensor) -> Tensor:
        self.events.append(f"put {slot.number}")
        return activation

    def take(self, slot: Slot, stored: Tensor) -> tuple[Tensor, Work]:
        self.events.append(f"fetch {slot.number}")
        arriving = torch.full_like(stored, torch.nan)
        return arriving, Work(partial(self.events.append, f"arrived {slot.number}"), lambda: arriving.copy_(stored))


def test_the_checkpoint_before_is_fetched_while_a_group_runs_again():
    store = LoggingStore()

    def logged(number: int, x: Tensor) -> Tensor:
        store.events.append(f"run {number}")
        return blocks(3)[number](x)

    x = torch.randn(4, requires_grad=True)
    run_with(store)([partial(logged, number) for number in range(3)], x * 1).sum().backward()
    forward, backward = store.events[:6], store.events[6:]
    assert forward == ["put 0", "run 0", "put 1", "run 1", "put 2", "run 2"]
    assert backward == [
        *("fetch 2", "arrived 2", "fetch 1", "run 2"),
        *("arrived 1", "fetch 0", "run 1"),
        *("arrived 0", "run 0"),
    ]
    assert x.grad.equal(gradient_of(x.detach(), run_in_order, num_blocks=3))


@pytest.mark.parametrize("second", [(4, 6), (6, 4), (24,)])  # all have the same size, hence the same slab
def test_a_forward_before_the_backward_of_the_last_one_is_an_error(second):
    run = checkpointed_blocks(ActivationsConfig("keep", 2))
    losses = [run(blocks(5), torch.ones(shape, requires_grad=True) * 1).sum() for shape in ((4, 6), second)]
    with pytest.raises(ValueError, match=r"overwritten checkpoint 2 .* ActivationsConfig\.defragment=false"):
        losses[0].backward()


@pytest.mark.parametrize("store", ["keep", "partition_host"])
def test_micro_batches_use_the_slab_again_and_evaluation_does_not_touch_it(store):
    run, x = checkpointed_blocks(ActivationsConfig(store, 2)), torch.randn(4, 6)
    expected = gradient_of(x, run_in_order)
    with MemoryTracker(CPU) as tracker:
        assert gradient_of(x, run).equal(expected)
        tracker.restart()
        for _ in range(3):
            assert gradient_of(x, run).equal(expected)
            with torch.no_grad():
                run(blocks(5), torch.randn(9, 5))  # of another shape, as in generation
                between = run(blocks(5), x)
            assert between.equal(run_in_order(blocks(5), x))
        for memory in (tracker.device, tracker.host):
            assert memory.num_allocations[TensorKind.CHECKPOINTS] == memory.num_allocations[TensorKind.BUFFERS] == 0


@pytest.mark.parametrize("store", STORES)
def test_stores_copy_and_change_nothing(store):
    """With slabs the caller may change its tensor afterwards; no store ever writes to it."""
    chosen = make_store(store, Axis.trivial("tensor"), CPU, SideStream(CPU), defragments=True)
    x = torch.arange(12.0).view(3, 4).t()  # not contiguous
    before = x.clone()
    stored = chosen.put(Slot(0, 2), x)
    assert x.equal(before)
    x.zero_()
    chosen.put(Slot(1, 2), torch.ones(4, 3))
    taken, work = chosen.take(Slot(0, 2), stored)
    work.wait()
    assert taken.equal(before)


def test_a_checkpoint_that_a_block_changes_is_copied_or_an_error():
    def changing(x: Tensor) -> Tensor:
        return x.mul_(3).cos()

    for defragment in (True, False):
        x = torch.randn(4, requires_grad=True)
        loss = checkpointed_blocks(ActivationsConfig("keep", 1, defragment))([torch.cos, changing], x).sum()
        if defragment:
            loss.backward()
            assert x.grad.equal(3 * (3 * x.cos()).sin() * x.sin())
        else:
            with pytest.raises(RuntimeError, match=r"modified in place; set ActivationsConfig\.defragment=true"):
                loss.backward()


def test_a_backward_may_be_repeated():
    x = torch.randn(4, requires_grad=True)
    run = checkpointed_blocks(ActivationsConfig("partition_host", 2))
    loss = run(blocks(5), x * 1).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert first.equal(second)
    assert first.equal(gradient_of(x.detach(), run_in_order))


def test_without_a_slab_checkpoints_are_freed_during_backward():
    """Autograd holds each until its group's backward has run: at the end of backward the later ones are freed."""
    run = checkpointed_blocks(ActivationsConfig("keep", 1, defragment=False))
    left = []
    with MemoryTracker(CPU) as tracker:
        x = torch.randn(100, requires_grad=True) * 1
        x.register_hook(lambda _: left.append(tracker.device.resident[TensorKind.CHECKPOINTS]))
        loss = run(blocks(5), x).sum()
        assert tracker.device.resident[TensorKind.CHECKPOINTS] == 5 * 400
        loss.backward()
    assert left == [400]
