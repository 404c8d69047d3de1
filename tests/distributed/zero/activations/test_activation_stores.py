"""Activation stores under ZeRO and tensor parallelism: the same training, fewer bytes, and one gather a checkpoint."""

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from gpt.generate import generate
from gpt.shape.config import ModelConfig
from gpt.train_step import evaluate, train_step
from lab.observe.memory_tracker import MemoryTracker
from parallel.comm_log import CommLog
from parallel.memory_kinds import TensorKind, allocate_buffer
from parallel.mesh import Axis, Mesh
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens
from parallel.validation.errors import ConfigError
from tests.distributed.gpt.test_tensor_parallel import (
    SEQ,
    assert_equals_whole,
    assert_same_bits,
    build,
    config_of,
    traffic_of_a_step,
    train,
    train_whole,
)
from tests.pairwise import covering, noting
from tests.ranks import run_cases
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

FACTORS = {
    "sizes": [(2, 1), (1, 2)],  # data x tensor; below, dropout is replayed on two of each
    "stage": [1, 3],  # whose modules run without hooks, and with them
    "store": ["keep", "partition", "partition_host", "selective"],
    "layers_per_checkpoint": [1, 2],
    "defragment": [True, False],
    "num_micro_batches": [1, 2],
    "is_split": [False],
}


def is_possible(combination: dict) -> bool:
    return combination["store"] != "partition" or combination["sizes"][1] > 1


def check_stores(combinations: list[dict]) -> None:
    config = config_of(97, num_layers=3)  # more checkpoints than buffers, and a last checkpoint of fewer layers
    for num_ranks in (1, 2, 4, 8):
        if chosen := [combination for combination in combinations if math.prod(combination["sizes"]) == num_ranks]:
            results = run_cases(num_ranks, train, [arguments(config, **combination) for combination in chosen])
            for combination, of_ranks in zip(chosen, results, strict=True):
                data_size, tensor_size = combination["sizes"]
                expected = train_whole(config, data_size, combination["num_micro_batches"])
                with noting(combination):
                    assert_equals_whole(of_ranks, expected, tensor_size)


def arguments(
    config: ModelConfig,
    sizes: tuple[int, int],
    stage: int,
    store: str,
    num_micro_batches: int,
    is_split: bool = False,
    **settings: int,
) -> tuple:
    """Return the arguments of `train`."""
    return config, sizes[1], is_split, ZeroConfig(stage, 5000), num_micro_batches, ActivationsConfig(store, **settings)


def test_every_store_trains_as_one_process_without_checkpoints():
    kept_whole = {"sizes": (1, 2), "stage": 2, "store": "partition_host", "num_micro_batches": 1, "is_split": True}
    check_stores([*covering(FACTORS, 2, is_possible), kept_whole])


def test_dropout_is_replayed_to_the_bit():
    config = config_of(97, dropout=0.2)
    chosen = {(3, False): ["partition", "partition_host"], (1, False): ["selective", "keep"], (1, True): ["keep"]}
    for (stage, is_split), stores in chosen.items():
        cases = [arguments(config, (2, 2), stage, store, 1, is_split) for store in ("none", *stores)]
        plain, *others = run_cases(4, train, cases)
        for recomputed in others:
            assert_same_bits(recomputed, plain)
        assert plain[0].losses != train_whole(config_of(97), 2).losses


@pytest.mark.parametrize(
    "tokens", [ReplicatedTokens(Axis.trivial("tensor")), SplitTokens(Axis("tensor", 2, 0, CommLog()))]
)
def test_partitioning_activations_that_are_not_replicated_is_refused(tokens):
    message = "nothing to partition; choose keep or partition_host.*start 2 or more tensor ranks without sequence paral"
    with pytest.raises(ConfigError, match=message):
        build(config_of(97), tokens, ActivationsConfig("partition"))


def test_partitioning_adds_one_all_gather_a_checkpoint():
    """The gather has batch x sequence x hidden elements, a block's all-reduces 12 times as many (paper, section 8)."""
    for layers in (1, 2):
        stores = [ActivationsConfig(store, layers) for store in ("keep", "partition", "partition_host")]
        found = run_cases(2, traffic_of_a_step, [(2, False, activations, False, 6) for activations in stores])
        (kept, kept_bytes), *partitioned = (of_ranks[0] for of_ranks in found)
        assert kept.keys() == {("all_reduce", "forward"), ("all_reduce", "backward")}
        for cut, cut_bytes in partitioned:
            assert cut - kept == {("all_gather", "backward"): 6 // layers}
            assert not kept - cut
            assert 0 < cut_bytes - kept_bytes <= kept_bytes / 10


def micro_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(97, (2, SEQ + 1), generator=generator) for _ in range(2)]


NUM_MORE = 3  # steps, with an evaluation and a generated text after the first


def allocations_of_steps(stage: int, store: str) -> tuple[Counter, Counter, int]:
    """Return the allocations after the first step by kind, on device and host, and the number of gradients."""
    mesh = Mesh.create(tensor_size=2, allocate=allocate_buffer)
    gpt = build(config_of(97, num_layers=3), ReplicatedTokens(mesh.tensor), ActivationsConfig(store))
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(stage, 2000, prefetch_numel=15_000, defragment=True))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, tensor=mesh.tensor, fused=True)
    with MemoryTracker(torch.device("cpu")) as tracker:
        train_step(model, optimizer, micro_batches(), mesh)
        tracker.restart()
        resident = tracker.device.resident.copy()
        for step in range(NUM_MORE):
            train_step(model, optimizer, micro_batches(), mesh)
            if step == 0:
                evaluate(model, micro_batches(), mesh)
                generate(model, torch.zeros(1, 3, dtype=torch.int64), 2, SEQ)
        for kind in (TensorKind.CHECKPOINTS, TensorKind.GRADIENTS):
            assert tracker.device.resident[kind] == resident[kind]
    num_grads = NUM_MORE * 2 * len(list(model.module.parameters()))
    return +tracker.device.num_allocations, +tracker.host.num_allocations, num_grads


def test_after_the_first_step_neither_checkpoints_nor_gradients_are_allocated():
    """Autograd's own gradients are the exception: each is copied once into its bucket and freed."""
    cases = [(0, "keep"), (2, "partition"), (3, "partition_host")]
    for on_device, on_host, num_grads in itertools.chain(*run_cases(2, allocations_of_steps, cases)):
        assert on_host == {}
        assert on_device[TensorKind.CHECKPOINTS] == on_device[TensorKind.BUFFERS] == 0
        assert on_device[TensorKind.GRADIENTS] == num_grads
