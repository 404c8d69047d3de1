"""Split layers as operations of a graph: what torch knows of them when it decides what to compute again."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from parallel.comm_log import CommLog
from parallel.mesh import Axis
from parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens, TokenLayout
from parallel.tensor.traced_layers import make_traceable


@pytest.mark.parametrize(
    ("kind", "layout", "num_tokens"),
    [
        (ColumnParallelLinear, ReplicatedTokens, 4),
        (RowParallelLinear, ReplicatedTokens, 4),
        (ColumnParallelLinear, SplitTokens, 2 * 4),  # it gathers those of the other rank
        (RowParallelLinear, SplitTokens, 4),
    ],
)
def test_a_traced_layer_has_the_flops_of_its_product(
    kind: type[ColumnParallelLinear | RowParallelLinear], layout: type[TokenLayout], num_tokens: int
):
    with FakeTensorMode():
        layer = kind(8, 6, layout(Axis("tensor", 2, 0, CommLog())))
        make_traceable(layer)
        assert layer.traced is not None
        with FlopCounterMode(display=False) as counter:
            layer.traced(torch.empty(4, layer.weight.shape[1]), [layer.weight], [])
    assert counter.get_total_flops() == 2 * num_tokens * layer.weight.numel() == 2 * num_tokens * 24
