"""Ranks that run out of batches first: they train as one process that has the batches of all ranks."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from parallel.comm_log import CommLog
from parallel.mesh import Axis, Mesh
from tests.ranks import run_ranks
from tests.twins import ALL_STAGES, check_all, configs, params_of
from tests.unit.zero.step.test_loss_scale import CopiesToHost
from zero.engine import ZeroDataParallel
from zero.memory.streams import SideStream
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig
from zero.uneven import _Exchange, join

NUM_BATCHES = [3, 1]


def batches_of(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(2, 8, dtype=torch.float64, generator=generator) for _ in range(NUM_BATCHES[rank]))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()


def check_joined(config: ZeroConfig) -> None:
    for num_micro_batches in (1, 2):
        module, data = build(), Mesh.create(tensor_size=1).data
        plain = copy.deepcopy(module)
        model = ZeroDataParallel(module, data, config)
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
        is_last = True
        for turn, (batch, weight) in enumerate(join(batches_of(data.rank), data)):
            is_last = turn % num_micro_batches == num_micro_batches - 1
            with nullcontext() if is_last else model.accumulate():
                (model(batch).square().mean() * weight / num_micro_batches).backward()
            if is_last:
                optimizer.step()
        if not is_last:
            optimizer.step()
        expected = train_plain(plain, num_micro_batches)
        torch.testing.assert_close(params_of(model), expected, rtol=1e-10, atol=1e-10)


def train_plain(plain: nn.Module, num_micro_batches: int) -> dict[str, Tensor]:
    """Train in one process on the batches of all ranks, and return the parameters."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    batches = [list(batches_of(rank)) for rank in range(len(NUM_BATCHES))]
    for start in range(0, max(NUM_BATCHES), num_micro_batches):
        optimizer.zero_grad()
        for batch in (batch for of_rank in batches for batch in of_rank[start : start + num_micro_batches]):
            (plain(batch).square().mean() / (num_micro_batches * len(NUM_BATCHES))).backward()
        optimizer.step()
    return {name: param.detach() for name, param in plain.named_parameters()}


def test_ranks_that_run_out_first_train_as_one_process():
    zero_configs = configs(*ALL_STAGES, units=[("0", "2")]) + configs(2, 3, accumulate=["local"])
    run_ranks(2, check_all, [check_joined], zero_configs)


def turns_of(nums_batches: list[int]) -> list[tuple[int, float]] | str:
    data = Mesh.create(tensor_size=1).data
    try:
        return list(join(iter(range(nums_batches[data.rank])), data))
    except ValueError as error:
        return str(error)


def test_the_last_batch_is_repeated_with_weight_0():
    longest = [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert run_ranks(3, turns_of, [3, 1, 2]) == [longest, [(0, 1.0), (0, 0.0), (0, 0.0)], [*longest[:2], (1, 0.0)]]
    assert run_ranks(2, turns_of, [2, 2]) == [longest[:2]] * 2
    assert run_ranks(1, turns_of, [2]) == [longest[:2]]


class MetaAxis(Axis):
    """The only rank of an axis along which tensors without values are sent."""

    def communication_device(self, tensor: Tensor) -> torch.device:
        return torch.device("meta")


def test_the_host_does_not_wait_for_the_flags_of_others():
    axis = MetaAxis("data", 1, 0, CommLog())
    with CopiesToHost() as copies:
        _Exchange(True, axis, SideStream(torch.device("cpu")))
    assert copies.go_on == [True]


def test_a_rank_without_batches_is_named_on_every_rank():
    assert run_ranks(3, turns_of, [2, 0, 1]) == ["data rank 1 of 3 has no batch; give each rank at least one"] * 3
