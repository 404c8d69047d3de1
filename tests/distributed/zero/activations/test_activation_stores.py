"""Activation stores under ZeRO and tensor parallelism: the same training, fewer bytes, and one gather a checkpoint."""

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from gpt.generate import generate
from gpt.train_step import evaluate, train_step
from lab.observe.memory_tracker import MemoryTracker
from parallel.errors import ConfigError
from parallel.memory_kinds import TensorKind, allocate_buffer
from parallel.mesh import Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from tests.distributed.gpt.test_tensor_parallel import (
    SEQ,
    assert_equals_whole,
    assert_same_bits,
    build,
    config_of,
    layout_of,
    traffic_of_a_step,
    train,
    train_whole,
)
from tests.pairwise import pairwise
from tests.ranks import run_ranks
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.engine import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig

NUM_LAYERS = 5
FACTORS = {
    "sizes": [(2, 1), (1, 2), (2, 2), (1, 4)],  # data x tensor
    "stage": [0, 1, 2, 3],
    "store": ["keep", "partition", "partition_host", "selective"],
    "layers_per_checkpoint": [1, 2],
    "defragment": [True, False],
    "num_micro_batches": [1, 2],
}


def is_possible(combination: dict) -> bool:
    return combination["store"] != "partition" or combination["sizes"][1] > 1


def check_store(
    sizes: tuple[int, int],
    stage: int,
    store: str,
    layers_per_checkpoint: int,
    defragment: bool,
    num_micro_batches: int,
) -> None:
    data_size, tensor_size = sizes
    config = config_of(97, num_layers=NUM_LAYERS)
    activations = ActivationsConfig(store, layers_per_checkpoint, defragment)
    arguments = (config, tensor_size, False, ZeroConfig(stage, 2000), num_micro_batches, activations)
    results = run_ranks(data_size * tensor_size, train, *arguments)
    assert_equals_whole(results, train_whole(config, data_size, num_micro_batches), tensor_size)


@pytest.mark.parametrize(
    "combination",
    [chosen for chosen in pairwise(**FACTORS) if is_possible(chosen)],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_every_store_trains_as_one_process_without_checkpoints(combination):
    check_store(**combination)


ALL_SIZES = [*FACTORS["sizes"], (1, 1), (2, 4)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "stage", "store"), list(itertools.product(ALL_SIZES, FACTORS["stage"], FACTORS["store"]))
)
def test_all_stores_in_all_layouts_and_stages_train_as_one_process(sizes, stage, store):
    if is_possible({"sizes": sizes, "store": store}):
        check_store(sizes, stage, store, layers_per_checkpoint=2, defragment=True, num_micro_batches=2)


@pytest.mark.parametrize(("store", "stage"), [("partition", 3), ("partition_host", 2), ("selective", 1)])
def test_dropout_is_replayed_to_the_bit(store, stage):
    config = config_of(97, dropout=0.2, num_layers=3)
    plain, recomputed = (
        run_ranks(4, train, config, 2, False, ZeroConfig(stage, 2000), 2, ActivationsConfig(chosen))
        for chosen in ("none", store)
    )
    assert_same_bits(recomputed, plain)


def test_with_sequence_parallelism_whole_checkpoints_are_kept_on_the_host():
    config, activations = config_of(97, num_layers=3), ActivationsConfig("partition_host")
    results = run_ranks(2, train, config, 2, True, ZeroConfig(2, 2000), 1, activations)
    assert_equals_whole(results, train_whole(config, 1), 2)


def refusal(is_split: bool) -> str:
    """Return the message with which the partition store is refused."""
    tokens = layout_of(Mesh.create(torch.distributed.get_world_size()).tensor, is_split)
    with pytest.raises(ConfigError) as raised:
        build(config_of(97), tokens, ActivationsConfig("partition"))
    return str(raised.value)


@pytest.mark.parametrize(("num_ranks", "is_split"), [(1, False), (2, True)])
def test_partitioning_activations_that_are_not_replicated_is_refused(num_ranks, is_split):
    for message in run_ranks(num_ranks, refusal, is_split):
        assert "nothing to partition; choose keep or partition_host" in message
        assert "start 2 or more tensor ranks without sequence parallelism" in message


@pytest.mark.parametrize("store", ["partition", "partition_host"])
@pytest.mark.parametrize(("tensor_size", "layers_per_checkpoint"), [(2, 1), (4, 2)])
def test_partitioning_adds_one_all_gather_a_checkpoint(store, tensor_size, layers_per_checkpoint):
    """The gather has batch x sequence x hidden elements, a block's all-reduces 12 times as many (paper, section 8)."""
    (kept, kept_bytes), (cut, cut_bytes) = (
        run_ranks(tensor_size, traffic_of_a_step, tensor_size, False, activations, False, 6)[0]
        for activations in (
            ActivationsConfig("keep", layers_per_checkpoint),
            ActivationsConfig(store, layers_per_checkpoint),
        )
    )
    assert kept.keys() == {("all_reduce", "forward"), ("all_reduce", "backward")}
    assert cut - kept == {("all_gather", "backward"): 6 // layers_per_checkpoint}
    assert not kept - cut
    assert 0 < cut_bytes - kept_bytes <= kept_bytes / 10


def build_parts(
    stage: int, activations: ActivationsConfig, num_layers: int = 3
) -> tuple[Mesh, ZeroDataParallel, ZeroOptimizer]:
    """Build the model, engine and optimizer with all ranks along the tensor axis."""
    mesh = Mesh.create(torch.distributed.get_world_size(), allocate=allocate_buffer)
    gpt = build(config_of(97, num_layers=num_layers), ReplicatedTokens(mesh.tensor), activations)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(stage, 2000, prefetch_numel=15_000, defragment=True))
    return mesh, model, ZeroOptimizer(model, torch.optim.AdamW, tensor=mesh.tensor, fused=True)


def micro_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(97, (2, SEQ + 1), generator=generator) for _ in range(2)]


def allocations_of_five_steps(stage: int, store: str) -> tuple[Counter, Counter, int]:
    """Return the allocations after the first step by kind, on device and host, and the number of gradients."""
    mesh, model, optimizer = build_parts(stage, ActivationsConfig(store))
    with MemoryTracker(torch.device("cpu")) as tracker:
        train_step(model, optimizer, micro_batches(), mesh)
        tracker.restart()
        resident = tracker.device.resident.copy()
        for step in range(5):
            train_step(model, optimizer, micro_batches(), mesh)
            if step == 2:
                evaluate(model, micro_batches(), mesh)
                generate(model, torch.zeros(1, 3, dtype=torch.int64), 2, SEQ)
        for kind in (TensorKind.CHECKPOINTS, TensorKind.GRADIENTS):
            assert tracker.device.resident[kind] == resident[kind]
    num_grads = 5 * 2 * len(list(model.module.parameters()))
    return +tracker.device.num_allocations, +tracker.host.num_allocations, num_grads


@pytest.mark.parametrize(("stage", "store"), [(0, "keep"), (2, "partition"), (3, "partition_host")])
def test_after_the_first_step_neither_checkpoints_nor_gradients_are_allocated(stage, store):
    """Autograd's own gradients are the exception: each is copied once into its bucket and freed."""
    for on_device, on_host, num_grads in run_ranks(2, allocations_of_five_steps, stage, store):
        assert on_host == {}
        assert on_device[TensorKind.CHECKPOINTS] == on_device[TensorKind.BUFFERS] == 0
        assert on_device[TensorKind.GRADIENTS] == num_grads
