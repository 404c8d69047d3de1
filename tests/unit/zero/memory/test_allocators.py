"""Host memory that cannot be allocated."""

import pytest
import torch

from parallel.errors import ConfigError
from parallel.memory_kinds import TensorKind
from zero.memory.allocators import host_allocator


def test_host_memory_that_cannot_be_allocated_is_an_error_with_its_size():
    with pytest.raises(
        ConfigError, match=r"1\.13e\+06 GB of host memory for moments could not be allocated: .*; offload less"
    ):
        host_allocator(torch.device("cpu"), TensorKind.MOMENTS)(2**50 // 4, torch.float32)
