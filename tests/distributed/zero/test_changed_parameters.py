"""Parameters that are written in place outlive the next step."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from parallel.mesh import Mesh
from tests.ranks import run_ranks
from tests.twins import assert_same_bits, configs
from zero.engine import ZeroDataParallel
from zero.memory.placement import NO_OFFLOAD, OffloadConfig
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig
from zero.state.owned_state import owned_state

OPTIMIZER_ON_HOST = OffloadConfig("host", ("optimizer",))
RESIDENT = [*configs(0, 1, 2, bucket_numel=[100]), ZeroConfig(3, 100, resident_numel=1000)]


def small_net(seed: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    module = model.module if isinstance(model, ZeroDataParallel) else model
    return model(torch.randn(5, 6, generator=generator).to(next(module.parameters()).dtype)).square().sum()


def copy_values(module: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for param, value in zip(module.parameters(), source.parameters(), strict=True):
            param.copy_(value)


def copy_data(module: nn.Module, source: nn.Module) -> None:
    for param, value in zip(module.parameters(), source.parameters(), strict=True):
        param.data.copy_(value.data)


def clamp(module: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.clamp_(-0.1, 0.1)


def clamp_data(module: nn.Module, source: nn.Module) -> None:
    for param in module.parameters():
        param.data.clamp_(-0.1, 0.1)


def write_one_element(module: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        module[2].weight[3, 4] = 7.0


def load_state_dict(module: nn.Module, source: nn.Module) -> None:
    module.load_state_dict(source.state_dict())


def write_vector(module: nn.Module, source: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(source.parameters()), module.parameters())


def replace_data(module: nn.Module, source: nn.Module) -> None:
    for param, value in zip(module.parameters(), source.parameters(), strict=True):
        param.data = value.data


KEPT: list[Tensor] = []


def write_kept_data(module: nn.Module, source: nn.Module) -> None:
    """Write to `.data` that was read before the last step, by a collective, of which autograd knows nothing."""
    for data in KEPT:
        dist.all_reduce(data)


WAYS: list[Callable[[nn.Module, nn.Module], None]] = [
    *(copy_values, clamp, write_one_element, load_state_dict),
    *(copy_data, clamp_data, write_vector, replace_data, write_kept_data),
]


def start(
    config: ZeroConfig, offload: OffloadConfig, module: nn.Module, lr: float = 2**-4
) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    model = ZeroDataParallel(module, Mesh.create(tensor_size=1).data, config, offload=offload)
    return model, ZeroOptimizer(model, torch.optim.SGD, lr=lr)


def full_buffers(model: ZeroDataParallel) -> list[Tensor]:
    """Return copies of all parameters, without reading one."""
    return [flat.full.clone() for flat in model.flats]


def take_step(model: ZeroDataParallel, optimizer: ZeroOptimizer, step: int) -> None:
    loss_of(model, step, model.shard_axis.rank).backward()
    optimizer.step()


Case = tuple[ZeroConfig, OffloadConfig, torch.dtype]
CASES: list[Case] = [
    *itertools.product(RESIDENT, [NO_OFFLOAD, OPTIMIZER_ON_HOST], [torch.bfloat16]),
    (RESIDENT[1], NO_OFFLOAD, torch.float16),
    (RESIDENT[2], OPTIMIZER_ON_HOST, torch.float32),
]


def check_written_parameters_outlive_the_next_step() -> None:
    """Take steps with a learning rate of 0: written values stay, and others keep the digits of their master weights."""
    for config, offload, dtype in CASES:
        model, optimizer = start(config, offload, small_net(0, dtype), lr=0.0)
        for step, write in enumerate(WAYS):
            for bucket in optimizer.buckets:
                bucket.master.mul_(1 + 2**-12)  # hidden by rounding to a half type
            before, fine = full_buffers(model), [bucket.master.clone() for bucket in optimizer.buckets]
            write(model.module, small_net(step + 1, dtype))
            KEPT[:] = [param.data for param in model.module.parameters()] if write is replace_data else []
            written = full_buffers(model)
            assert not all(map(torch.equal, before, written))
            take_step(model, optimizer, step)
            assert all(map(torch.equal, full_buffers(model), written))
            for bucket, digits in zip(optimizer.buckets, fine, strict=True):
                is_kept = digits.to(dtype) == bucket.params.owned
                assert bucket.master.equal(digits.where(is_kept, bucket.params.owned))


def test_written_parameters_outlive_the_next_step():
    run_ranks(2, check_written_parameters_outlive_the_next_step)


def check_loaded_values_train_on_as_from_the_start() -> None:
    for config, offload in itertools.product(RESIDENT, [NO_OFFLOAD, OPTIMIZER_ON_HOST]):
        model, optimizer = start(config, offload, small_net(0))
        expected_model, expected_optimizer = start(config, offload, small_net(1))
        take_step(model, optimizer, 0)
        model.module.load_state_dict(small_net(1).state_dict())
        for step in (1, 2):
            take_step(model, optimizer, step)
            take_step(expected_model, expected_optimizer, step)
        assert_same_bits(owned_state(model, optimizer), owned_state(expected_model, expected_optimizer))
        for either in (model, expected_model):  # and then save, without a step
            either.module.load_state_dict(small_net(2).state_dict())
        state = owned_state(model, optimizer)
        assert_same_bits(state, owned_state(expected_model, expected_optimizer))
        rounded = {b.shard: b.params.owned for b in optimizer.buckets}
        assert all(b.master.to(rounded[b.shard].dtype).equal(rounded[b.shard]) for b in optimizer.buckets)


def test_loaded_values_train_on_as_from_the_start():
    run_ranks(2, check_loaded_values_train_on_as_from_the_start)
