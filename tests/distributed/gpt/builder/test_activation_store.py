"""The choice of the store of activations on several ranks, which have collectives of the store in common."""

from unittest import mock

import torch

from gpt.builder.activation_store import chosen_activations
from gpt.settings.parser import parse_settings
from parallel.mesh import Axis, Mesh
from tests.ranks import run_ranks
from tests.unit.gpt.builder.test_activation_store import BASE, BATCH, SHAPE


def store_of_rank() -> str:
    """Return the store that `auto` chooses if the first rank's device has too little memory for another one."""
    settings = parse_settings([f"--config={BASE}", *SHAPE, *BATCH, "--activations.store=auto"]).with_gradient_types(2)
    mesh = Mesh.create(1)
    memory_bytes = 4_000_000 if mesh.data.rank == 0 else 1_000_000_000
    with mock.patch("gpt.builder.activation_store.memory_per_rank", return_value=memory_bytes):
        return chosen_activations(settings, mesh, Axis.trivial("tensor"), torch.device("cpu")).store


def test_ranks_with_other_memory_choose_one_store():
    assert run_ranks(2, store_of_rank) == ["partition_host"] * 2
