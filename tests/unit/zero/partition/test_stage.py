"""The table of stages, and the settings that choose among them."""

import pytest
import torch

from parallel.validation.errors import ConfigError
from zero.core.partition.stage import Lifetime
from zero.settings.config import ZeroConfig


def test_an_alignment_that_is_no_multiple_is_refused():
    with pytest.raises(ConfigError, match=r"ZeroConfig\.alignment=24 is not a multiple of 16"):
        ZeroConfig(alignment=24)


def test_gradients_are_freed_between_steps_in_stage_3_unless_memory_is_to_be_defragmented():
    for stage, by_default in ((0, True), (1, True), (2, True), (3, False)):
        for setting, allocates_once in ((None, by_default), (True, True), (False, False)):
            lifetime = ZeroConfig(stage, defragment=setting).policy.owned_grads
            assert (lifetime is Lifetime.PERSISTENT) == allocates_once


def test_buckets_grow_with_the_ranks_as_long_as_they_are_small_beside_what_is_allocated():
    ten_billion, bf16 = 10**10, torch.bfloat16
    for config, num_elements, num_ranks, expected in [
        (ZeroConfig(1), ten_billion, 32, 2**25),
        (ZeroConfig(1), ten_billion, 400, 400 * 2**20),
        (ZeroConfig(1), 10**9, 400, 10**9 // 8),
        (ZeroConfig(1), 10**6, 400, 2**25),
        (ZeroConfig(1, reduce_dtype="bf16"), ten_billion, 1024, 1_600_000_000 // 6),  # full gradients are cast: staged
        (ZeroConfig(2), ten_billion, 128, 128 * 2**20),
        (ZeroConfig(2), ten_billion, 1024, 1_600_000_000 // 6),
        (ZeroConfig(3, reduce_dtype="fp32"), ten_billion, 1024, 1_600_000_000 // 12),
        (ZeroConfig(3, accumulate="local"), ten_billion, 1024, 1024 * 2**20),
        (ZeroConfig(2, bucket_numel=5000), ten_billion, 1024, 5000),
        (ZeroConfig(2, bucket_numel=None), ten_billion, 1024, ten_billion),
    ]:
        assert config.chosen_bucket_numel(num_elements, num_ranks, bf16) == expected, config
