"""Units chosen by patterns: buckets are reduced in the order of backward, in whatever order patterns are written."""

import pytest
import torch
from torch import Tensor, nn

from parallel.errors import ConfigError
from parallel.mesh import Axis
from zero.engine import ZeroDataParallel
from zero.partition.config import ZeroConfig
from zero.units.unit import named_units

NUM_BLOCKS, WIDTH = 6, 16
NUMEL = WIDTH * (WIDTH + 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize(
    ("patterns", "units"),
    [
        (["*.first", "*.second"], ["", "0.first", "0.second", "1.first", "1.second"]),
        (["*.second", "*.first"], ["", "0.first", "0.second", "1.first", "1.second"]),
        (["*.first", "*"], ["", "0", "0.first", "1", "1.first"]),  # one inside another
    ],
)
def test_units_are_in_the_order_of_the_modules(patterns, units):
    assert named_units(nn.Sequential(Block(), Block()), patterns) == units


def test_a_module_in_two_units_is_refused_though_the_name_of_one_begins_as_the_other():
    model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(1, 1))})
    model["block2"] = nn.Sequential(model["block"][0])
    with pytest.raises(ConfigError, match="block and block2 share a module"):
        named_units(model, ["block", "block2"])


@pytest.mark.parametrize("patterns", [("*.first", "*.second"), ("*.second", "*.first")])
def test_gradients_of_few_units_are_staged_at_a_time(patterns):
    model = nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)])
    config = ZeroConfig(stage=3, bucket_numel=NUMEL, overlap=False, units=patterns)
    wrapped = ZeroDataParallel(model, Axis.trivial("data"), config)
    wrapped(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
    assert wrapped.reducer.reductions.staging.num_bytes <= 2 * 4 * NUMEL
