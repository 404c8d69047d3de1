"""A reduction in half precision over many ranks warns if the backend rounds at each of them."""

import warnings

import pytest
import torch
from torch import nn

from parallel.mesh import Mesh
from parallel.world import imitated_world
from zero.config import ZeroConfig
from zero.engine import ZeroDataParallel


def warnings_of(num_ranks: int, rank: int, backend: str, config: ZeroConfig) -> list[str]:
    """Return the warnings of one rank of an imitated world that wraps a bf16 module."""
    with imitated_world(rank, num_ranks, 8, backend), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = Mesh.create(tensor_size=1, imitated_backend=backend)
        ZeroDataParallel(nn.Linear(4, 4, dtype=torch.bfloat16), mesh.data, config)
    return [str(warning.message) for warning in caught if "NCCL" in str(warning.message)]


@pytest.mark.parametrize("stage", [0, 2])
def test_nccl_over_many_ranks_in_half_precision_warns_on_the_first_rank(stage):
    half = ZeroConfig(stage, reduce_dtype="bf16")
    (message,) = warnings_of(65, 0, "nccl", half)
    assert "65 ranks in torch.bfloat16" in message
    assert "ZeroConfig.reduce_dtype=fp32" in message
    assert warnings_of(65, 1, "nccl", half) == []
    assert warnings_of(64, 0, "nccl", half) == []
    assert warnings_of(65, 0, "gloo", half) == []
    assert warnings_of(65, 0, "nccl", ZeroConfig(stage, reduce_dtype="fp32")) == []
