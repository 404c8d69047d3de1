"""Activation checkpoints change nothing but memory, and a store gets each group's input once."""

import pytest
import torch
from torch import Tensor

from gpt.builder.train_state import build_model
from gpt.model.transformer import initialize
from parallel.mesh import Work
from tests.pairwise import pairwise, product_of
from tests.unit.gpt.model.models import ONE_DEVICE, batch, small_config, small_gpt
from zero.activations.checkpointed_blocks import ActivationsConfig, CheckpointedBlocks
from zero.activations.stores import Slot
from zero.memory.streams import SideStream


def loss_and_gradients(config, activations: ActivationsConfig) -> list[Tensor]:
    model = build_model(config, activations, ONE_DEVICE, torch.device("cpu"), torch.float64)
    initialize(model, seed=1)
    torch.manual_seed(7)
    loss = model(*batch(config))
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters()), torch.rand(4)]


FACTORS = {
    "store": ["keep", "partition_host"],
    "layers_per_checkpoint": [1, 2, 5, 8],
    "defragment": [False, True],
    "attention": ["flash", "math"],
    "dropout": [0.0, 0.1],
}
SELECTIVE = FACTORS | {"store": ["selective"], "layers_per_checkpoint": [1], "defragment": [False]}


@pytest.mark.parametrize("case", [*pairwise(**FACTORS), *product_of(SELECTIVE, *SELECTIVE)], ids=str)
def test_checkpoints_change_neither_the_loss_nor_a_gradient_nor_the_next_random_number(case):
    config = small_config(dropout=case["dropout"], attention=case["attention"])
    activations = ActivationsConfig(case["store"], case["layers_per_checkpoint"], case["defragment"])
    expected = loss_and_gradients(config, ActivationsConfig("none"))
    actual = loss_and_gradients(config, activations)
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        assert tensor.equal(expected_tensor)


class CopyingStore:
    """A store that copies every input to memory of its own, as one that partitions does, and records its calls."""

    def __init__(self):
        self.put_shapes, self.num_taken = [], 0

    def put(self, slot: Slot, activation: Tensor) -> Tensor:
        self.put_shapes.append(tuple(activation.shape))
        return activation.detach().clone()

    def take(self, slot: Slot, stored: Tensor) -> tuple[Tensor, Work]:
        self.num_taken += 1
        return stored, Work()


def test_a_store_sees_the_input_of_each_group_once_and_nothing_else():
    config, store = small_config(dropout=0.1), CopyingStore()
    model = small_gpt(config, CheckpointedBlocks(store, 2, SideStream(torch.device("cpu")), reuses_memory=False))
    torch.manual_seed(7)
    loss = model(*batch(config))
    assert store.put_shapes == 3 * [(2 * config.seq_length, config.hidden_size)]
    assert store.num_taken == 0
    loss.backward()
    assert len(store.put_shapes) == store.num_taken == 3
    expected = loss_and_gradients(config, ActivationsConfig("none"))[1:-1]
    for param, gradient in zip(model.parameters(), expected, strict=True):
        assert param.grad.equal(gradient)
