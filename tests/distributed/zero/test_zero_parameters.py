"""Every kind of parameter, buffer and module that a model may have trains as in one process, or is refused."""

import pytest
import torch
from torch import Tensor, nn

from parallel.mesh import Axis, Mesh
from tests.ranks import run_ranks
from tests.twins import ALL_STAGES, Twins, assert_same_bits, check_all, configs, params_of
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig


class UnusualTensors(nn.Module):
    """Parameters and buffers of every unusual shape, stride and dtype."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(8, 8).to(dtype) for dtype in (torch.float32, torch.bfloat16))
        self.gain = nn.Parameter(torch.randn(()))
        self.transposed = nn.Parameter(torch.randn(6, 8).t())
        self.strided = nn.Parameter(torch.randn(8, 2)[:, 0])
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("mask", torch.rand(8) > 0.5)
        self.register_buffer("shift", torch.randn(8, 8, dtype=torch.float64).t(), persistent=False)
        self.register_buffer("number", torch.tensor(seed, dtype=torch.int16))
        self.register_buffer("phase", torch.tensor(seed + 2j))
        self.register_buffer("nothing", torch.empty(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) * self.gain + self.strided * self.mask + self.shift.float().sum(0) * self.frozen
        for block in self.blocks:
            x = block(x.to(block.weight.dtype))
        return (x.float() @ self.transposed).square().mean()


def unusual_loss(module: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return module(torch.randn(4, 8, generator=generator))


def check_ranks_start_alike(config: ZeroConfig) -> None:
    data = Mesh.create(tensor_size=1).data
    module = UnusualTensors(seed=data.rank)
    expected, buffers = dict(UnusualTensors(seed=0).named_parameters()), dict(UnusualTensors(seed=0).named_buffers())
    model = ZeroDataParallel(module, data, config)
    assert_same_bits(params_of(model), {name: param.detach() for name, param in expected.items()})
    assert_same_bits(dict(module.named_buffers()), buffers)


def check_every_kind_of_parameter(config: ZeroConfig) -> None:
    """Small steps of SGD: ZeRO rounds each update of a bf16 parameter once, and so does torch."""
    twins = Twins(UnusualTensors(seed=0), config, torch.optim.SGD, lr=2**-6)
    for step in range(2):
        twins.backward(step, unusual_loss)
        twins.step(tolerance=2**-7)  # one unit in the last place of bf16


@pytest.mark.parametrize("data_size", [1, 2])
def test_ranks_start_alike_and_train_every_kind_of_parameter(data_size):
    checks = [check_ranks_start_alike, check_every_kind_of_parameter]
    run_ranks(data_size, check_all, checks, configs(*ALL_STAGES, bucket_numel=[20, None]))


def test_groups_with_foreign_or_repeated_parameters_are_refused():
    module = nn.Linear(3, 2)
    model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1))
    foreign = nn.Parameter(torch.zeros(5))
    with pytest.raises(ValueError, match=r"group 1 has a tensor of shape \(5,\) not of this model"):
        ZeroOptimizer(model, torch.optim.SGD, [{"params": [module.weight]}, {"params": [foreign]}])
    with pytest.raises(ValueError, match="in more than one parameter group"):
        ZeroOptimizer(model, torch.optim.SGD, [{"params": [module.bias]}, {"params": [module.bias]}])
