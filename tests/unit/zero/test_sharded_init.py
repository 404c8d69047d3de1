"""Parameters while a model is built: how many are unsharded, and those that are read have their values."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.core.partition.stage import STAGES
from zero.sharded_init import NUM_RECENT_MODULES, ShardedInit

READS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "index": lambda table: table["weight"],
    "values": lambda table: next(iter(table.values())),
    "items": lambda table: dict(table.items())["weight"],
    "copy": lambda table: copy.deepcopy(table)["weight"],
    "pickle": lambda table: pickle.loads(pickle.dumps(table))["weight"],
    "change": lambda table: table.update() or table.__setitem__("bias", None) or dict.__getitem__(table, "weight"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_table_of_parameters_that_is_read_has_their_values(read: Callable[[dict[str, Any]], Tensor]):
    with ShardedInit(Axis.trivial("data"), STAGES[3], 0) as init:
        first = nn.Linear(4, 4)
        expected = first.weight.detach().clone()
        others = [nn.Linear(4, 4) for _ in range(NUM_RECENT_MODULES)]
        assert first.weight.equal(expected)
        others += [nn.Linear(4, 4) for _ in range(NUM_RECENT_MODULES)]
        assert dict.__getitem__(first._parameters, "weight") in init._shards
        assert read(first._parameters).detach().equal(expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_complex_parameter_is_refused_by_name(stage):
    with (
        pytest.raises(ConfigError, match=r"^phase of ParameterDict is torch\.complex64; .* \(torch\.view_as_real\)"),
        ShardedInit(Axis.trivial("data"), STAGES[stage]),
    ):
        nn.ParameterDict({"phase": nn.Parameter(torch.ones(4, dtype=torch.complex64))})
