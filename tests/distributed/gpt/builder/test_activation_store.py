"""The choice of the store of activations on several ranks, which have collectives of the store in common."""

from unittest.mock import patch

import torch

from gpt.builder import activation_store
from gpt.builder.activation_store import chosen_activations
from gpt.settings.parser import parse_settings
from parallel.mesh import Mesh
from tests.ranks import run_ranks
from tests.unit.gpt.builder.test_activation_store import BASE, BATCH, SHAPE


def chosen_of_rank() -> str:
    """Return what is chosen if the second tensor rank has much less memory than the first."""
    mesh = Mesh.create(2)
    settings = parse_settings(
        [f"--config={BASE}", *SHAPE, *BATCH, "--parallel.tensor_size=2", "--activations.store=auto"]
    )
    with patch.object(activation_store, "memory_per_rank", lambda *_: (10**9, 2 * 10**6)[mesh.tensor.rank]):
        return chosen_activations(settings.with_gradient_types(1), mesh, mesh.tensor, torch.device("cpu")).store


def test_all_ranks_choose_by_the_memory_of_the_one_that_has_least():
    first, second = run_ranks(2, chosen_of_rank)
    assert first == second
