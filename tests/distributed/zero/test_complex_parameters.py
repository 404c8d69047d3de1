"""The state of complex parameters is saved, and loaded at another stage."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.mesh import Mesh
from tests.ranks import run_ranks
from tests.twins import assert_same_bits, params_of
from zero.engine import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig
from zero.sharded_init import ShardedInit
from zero.state.owned_state import describe_state, load_owned_state, owned_state
from zero.state.saved_state import SavedState, TensorRank, rank_file
from zero.state.tensor_file import write_tensors


class Filter(nn.Module):
    """A filter in the frequency domain. Its gradients are conjugated views, which are resolved when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.mixing = nn.Linear(5, 5).to(torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(self.mixing(torch.fft.rfft(x) * self.gain.conj()) * self.gain, n=8)


class Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Filter() for _ in range(2))
        self.phase = nn.Parameter(torch.tensor(1 + 0.5j, dtype=torch.complex128))
        self.frozen = nn.Parameter(torch.randn(3, 8, dtype=torch.complex128), requires_grad=False)
        self.head = nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) + (x * self.phase @ self.frozen.t()).abs()).square().mean()


def loss_of(module: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return module(torch.randn(4, 8, generator=generator, dtype=torch.float64))


def check_state_is_loaded_at_another_stage(folder: Path) -> None:
    data = Mesh.create(tensor_size=1).data
    states = {}
    for stage in (3, 1):
        torch.manual_seed(stage)
        config = ZeroConfig(stage, 50)
        with ShardedInit(data, config.policy, unsharded_numel=20) as init:
            filters = Filters()
        torch.manual_seed(stage)
        expected = {name: param.detach() for name, param in Filters().named_parameters()}
        model = ZeroDataParallel(filters, data, config, init=init)
        assert_same_bits(params_of(model), expected)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
        if stage == 3:
            loss_of(model, 0, data.rank).backward()
            optimizer.step()
            write_tensors(rank_file(folder, data.rank), owned_state(model, optimizer))
            description = describe_state(model, data.size, 1)
            dist.barrier()
        else:
            load_owned_state(model, optimizer, SavedState(folder, description), TensorRank())
        loss_of(model, 1, data.rank).backward()
        optimizer.step()
        states[stage] = params_of(model)
    assert_same_bits(states[1], states[3])


def test_a_saved_state_with_complex_parameters_is_loaded_at_another_stage(tmp_path):
    run_ranks(2, check_state_is_loaded_at_another_stage, tmp_path)
