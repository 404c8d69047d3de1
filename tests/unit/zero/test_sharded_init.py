"""The number of parameters that are unsharded while a model is built."""

import pytest
from torch import nn

from parallel.mesh import Axis
from zero.sharded_init import ShardedInit
from zero.stage import STAGES


@pytest.mark.parametrize(("num_layers", "limit", "num_sharded"), [(5, 80, 0), (6, 80, 1), (7, 80, 2)])
def test_no_more_is_sharded_than_the_limit_asks_for(num_layers: int, limit: int, num_sharded: int):
    with ShardedInit(Axis.trivial("data"), STAGES[3], limit) as init:
        layers = [nn.Linear(4, 4, bias=False) for _ in range(num_layers)]
        assert len(init._shards) == num_sharded
        assert layers[-1].weight not in init._shards
    assert len(init._shards) == num_layers
