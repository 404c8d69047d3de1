"""The choice of the store of activations on several ranks, which have collectives of the store in common."""

from unittest.mock import patch

import torch

from gpt.builder import activation_store
from gpt.builder.activation_store import chosen_activations
from gpt.settings.parser import parse_settings
from parallel.mesh import Mesh
from tests.ranks import run_cases
from tests.unit.gpt.builder.test_activation_store import BASE, BATCH, SHAPE


def chosen_of_rank(store: str) -> tuple[str, float | None]:
    """Return what is chosen if the second tensor rank has much less memory than the first."""
    mesh = Mesh.create(2)
    settings = parse_settings(
        [f"--config={BASE}", *SHAPE, *BATCH, "--parallel.tensor_size=2", f"--activations.store={store}"]
    )
    with patch.object(activation_store, "memory_per_rank", lambda *_: (10**9, 2 * 10**6)[mesh.tensor.rank]):
        found = chosen_activations(settings.with_gradient_types(1), mesh, mesh.tensor, torch.device("cpu"))
    return found.store, found.budget_gb


def test_all_ranks_choose_by_the_memory_of_the_one_that_has_least():
    for first, second in run_cases(2, chosen_of_rank, [("auto",), ("planned",)]):
        assert first == second
