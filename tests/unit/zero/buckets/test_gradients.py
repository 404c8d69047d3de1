"""The memory that gradients pass through, and a warning if a reduction over many ranks rounds at each of them."""

import warnings
from dataclasses import replace
from linecache import getline

import pytest
import torch
from torch import nn

from parallel.mesh import Axis, Mesh
from parallel.world import imitated_world
from zero.data_parallel import ZeroDataParallel
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig


def warnings_of(
    num_ranks: int, rank: int, backend: str, config: ZeroConfig, shard_size: int | None = None
) -> list[str]:
    """Return the warnings of one rank of an imitated world that wraps a bf16 module."""
    with imitated_world(rank, num_ranks, 8, backend), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = Mesh.create(tensor_size=1, shard_size=shard_size, imitated_backend=backend)
        ZeroDataParallel(nn.Linear(4, 4, dtype=torch.bfloat16), mesh.data, config)
    about_nccl = [warning for warning in caught if "NCCL" in str(warning.message)]
    assert all("ZeroDataParallel(" in getline(warning.filename, warning.lineno) for warning in about_nccl)
    return [str(warning.message) for warning in about_nccl]


@pytest.mark.parametrize("stage", [0, 2])
def test_nccl_over_many_ranks_in_half_precision_warns_on_the_first_rank(stage):
    half = ZeroConfig(stage, reduce_dtype="bf16")
    (message,) = warnings_of(65, 0, "nccl", half)
    assert "65 ranks in torch.bfloat16" in message
    assert "ZeroConfig.sum_over_ranks=fp32" in message
    assert " reduce_dtype=fp32" in message
    assert warnings_of(65, 1, "nccl", half) == []
    assert warnings_of(64, 0, "nccl", half) == []
    assert warnings_of(65, 0, "gloo", half) == []
    for without in (ZeroConfig(stage, reduce_dtype="fp32"), replace(half, sum_over_ranks="fp32")):
        assert warnings_of(65, 0, "nccl", without) == []


@pytest.mark.parametrize("shard_size", [2, 65])
def test_the_larger_one_of_shard_groups_and_replicas_counts(shard_size):
    half = ZeroConfig(2, reduce_dtype="bf16")
    (message,) = warnings_of(130, 0, "nccl", half, shard_size)
    assert "the gradients of 65 ranks" in message
    for other_rank in (1, shard_size):
        assert warnings_of(130, other_rank, "nccl", half, shard_size) == []


HOST = OffloadConfig("host", ("optimizer",))


@pytest.mark.parametrize(
    ("config", "offload", "staged_bytes", "host_staged_bytes"),
    [
        (ZeroConfig(1, 64), NO_OFFLOAD, 0, 0),  # full gradients persist, and are the messages
        (ZeroConfig(1, 64, reduce_dtype="bf16"), NO_OFFLOAD, 3 * 64 * 2, 0),  # they are cast into messages
        (ZeroConfig(1, 64, overlap=False, reduce_dtype="bf16"), NO_OFFLOAD, 64 * 2, 0),
        (ZeroConfig(2, 64), NO_OFFLOAD, 3 * 64 * 4, 0),
        (ZeroConfig(2, 256), NO_OFFLOAD, 2 * 256 * 4, 0),  # of two buckets no third one fills
        (ZeroConfig(2, 64), HOST, 3 * 64 * 4, 0),
        (ZeroConfig(2, 64, reduce_dtype="bf16"), HOST, 3 * 64 * 2, 64 * 4),  # a reduced shard is cast for the host
        (ZeroConfig(2, 64, reduce_dtype="bf16"), NO_OFFLOAD, 3 * 64 * 2, 0),
    ],
)
def test_memory_is_staged_for_the_buckets_that_are_under_way(config, offload, staged_bytes, host_staged_bytes):
    model = ZeroDataParallel(nn.Linear(16, 16), Axis.trivial("data"), config, offload=offload)
    for_host = sum(pool.num_bytes for pool in model.homes.optimizer.pools.values())
    assert (model.reducer.reductions.staging.num_bytes, for_host) == (staged_bytes, host_staged_bytes)
