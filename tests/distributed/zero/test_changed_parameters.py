"""Parameters that are written in place outlive the next step, and others keep the digits of their master weights."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.mesh import Mesh
from tests.ranks import run_cases
from tests.twins import configs
from zero.checkpoint.rank_state import RankState
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig

OPTIMIZER_ON_HOST = OffloadConfig("host", ("optimizer",))
RESIDENT = [*configs(0, 1, 2, bucket_numel=[100]), ZeroConfig(3, 100, resident_numel=1000)]
CASES = [
    *((config, NO_OFFLOAD, torch.bfloat16) for config in RESIDENT),
    (RESIDENT[0], OPTIMIZER_ON_HOST, torch.float16),
    (RESIDENT[1], OPTIMIZER_ON_HOST, torch.bfloat16),
    (RESIDENT[2], OPTIMIZER_ON_HOST, torch.float32),
]


def small_net(seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def write_one_element(module: nn.Module, _kept: list[Tensor]) -> None:
    with torch.no_grad():
        module[2].weight[3, 4] = 7.0


def replace_data(module: nn.Module, _kept: list[Tensor]) -> None:
    for param, value in zip(module.parameters(), small_net(1, module[0].weight.dtype).parameters(), strict=True):
        param.data = value.data


def write_kept_data(_module: nn.Module, kept: list[Tensor]) -> None:
    """Write to `.data` that was read before the last step, by a collective, of which autograd knows nothing."""
    for data in kept:
        dist.all_reduce(data)


WAYS: list[Callable[[nn.Module, list[Tensor]], None]] = [replace_data, write_one_element, write_kept_data]


def full_buffers(model: ZeroDataParallel) -> list[Tensor]:
    """Return copies of all parameters, without reading one."""
    for flat in model.flats:
        flat.take_replaced()
    return [flat.full.clone() for flat in model.flats]


def check_written_parameters(config: ZeroConfig, offload: OffloadConfig, dtype: torch.dtype) -> None:
    """Take steps with a learning rate of 0: written values stay, and others keep the digits of their master weights."""
    model = ZeroDataParallel(small_net(0, dtype), Mesh.create(tensor_size=1).data, config, offload=offload)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.0)
    kept: list[Tensor] = []
    for write in WAYS:
        for bucket in optimizer.buckets:
            bucket.master.mul_(1 + 2**-12)  # hidden by rounding to a half type
        before, fine = full_buffers(model), [bucket.master.clone() for bucket in optimizer.buckets]
        write(model.module, kept)
        kept = [param.data for param in model.module.parameters()] if write is write_one_element else []
        written = full_buffers(model)
        assert not all(map(torch.equal, before, written))
        model(torch.ones(5, 6, dtype=dtype)).square().sum().backward()
        optimizer.step()
        assert all(map(torch.equal, full_buffers(model), written))
        for bucket, digits in zip(optimizer.buckets, fine, strict=True):
            is_kept = digits.to(dtype) == bucket.params.own
            assert bucket.master.equal(digits.where(is_kept, bucket.params.own))
    for seed, saved in enumerate((optimizer, None), start=2):
        model.module.load_state_dict(small_net(seed, dtype).state_dict())
        RankState(model, saved).owned()  # a save without a step, with the optimizer's states or of weights alone
        assert all(bucket.master.to(dtype).equal(bucket.params.own) for bucket in optimizer.buckets)


def test_written_parameters_outlive_the_next_step():
    run_cases(2, check_written_parameters, CASES)
