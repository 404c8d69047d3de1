"""The collectives of an axis over NCCL against the obvious local computation, with a rank for each GPU."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parallel.test_axis import COLLECTIVES, check_collectives

pytestmark = pytest.mark.gpu


def check_rank(rank: int, num_ranks: int, store: str) -> None:
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        check_collectives(COLLECTIVES, "cuda")
    finally:
        dist.destroy_process_group()


def test_collectives_over_nccl_equal_the_local_computation(tmp_path: Path):
    if (num_ranks := torch.cuda.device_count()) < 2:
        pytest.skip("NCCL has one rank on a GPU, and this machine has one GPU")
    torch.multiprocessing.spawn(check_rank, (num_ranks, str(tmp_path / "store")), num_ranks)
