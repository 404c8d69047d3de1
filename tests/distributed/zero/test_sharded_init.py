"""A model that is initialized sharded has the values of one that is not, and is never in memory as a whole."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from parallel.mesh import Axis, Mesh
from tests.models import build
from tests.ranks import run_ranks
from tests.twins import assert_same_bits, params_of
from zero.data_parallel import ZeroDataParallel
from zero.settings.config import ZeroConfig
from zero.sharded_init import ShardedInit

STAGE_3 = ZeroConfig(stage=3, bucket_numel=500)


class Copied(nn.Module):
    """A model with blocks that are copies of one, and values that are read and changed after they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(16, 2, 2, 2, 32)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.extra = nn.ParameterList([torch.randn(5), torch.randn(3, 3)[:, 1]])
        self.empty, self.scalar = nn.Parameter(torch.empty(0, 2)), nn.Parameter(torch.tensor(2.5))
        with torch.no_grad():
            self.extra[0] += self.scalar
            self.model.encoder.layers[1].linear1.weight.copy_(self.model.encoder.layers[0].linear1.weight * 2)
            self.model.decoder.layers[0].linear1.weight.data[3].zero_()
            for param in self.model.decoder.parameters():
                param.data.mul_(1.5)


def copied() -> nn.Module:
    torch.manual_seed(0)
    return Copied().bfloat16()


def check_values(
    make: Callable[[], nn.Module], config: ZeroConfig, unsharded_numel: int, shard_size: int | None
) -> None:
    data = Mesh.create(tensor_size=1, shard_size=shard_size).data
    expected = make()
    with ShardedInit(data, config.policy, unsharded_numel) as init:
        module = make()
    if config.stage == 3:
        assert all(param.isnan().all() for param in module.parameters() if param.is_floating_point())
    model = ZeroDataParallel(module, data, config, init=init)
    assert_same_bits(params_of(model), {name: param.detach() for name, param in expected.named_parameters()})
    assert_same_bits(dict(module.named_buffers()), dict(expected.named_buffers()))
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in expected.parameters()]


def check_sharded_init(names: list[str]) -> None:
    for make in (copied, *(partial(build, name) for name in names)):
        check_values(make, STAGE_3, 0, None)
    check_values(copied, STAGE_3, 3000, None)
    check_values(copied, ZeroConfig(stage=2), 0, None)
    check_values(copied, STAGE_3, 0, 1)


@pytest.mark.parametrize(
    ("num_ranks", "names"), [(1, ["toy"]), (2, ["gpt", "toy", "llama", "t5", "albert", "frozen_gpt2"])]
)
def test_sharded_initialization_gives_the_values_of_ordinary_initialization(num_ranks, names):
    run_ranks(num_ranks, check_sharded_init, names)


def check_first_ranks_values() -> None:
    """Check that ranks draw the values of the first one, and continue from their own random states."""
    data = Mesh.create(tensor_size=1).data
    torch.manual_seed(0)
    expected = nn.Linear(30, 20)
    torch.manual_seed(data.rank)
    own = torch.get_rng_state()
    with ShardedInit(data, STAGE_3.policy, 0) as init:
        module = nn.Linear(30, 20)
    assert torch.get_rng_state().equal(own) == (data.rank > 0)
    model = ZeroDataParallel(module, data, STAGE_3, init=init)
    assert_same_bits(params_of(model), {name: param.detach() for name, param in expected.named_parameters()})


def test_ranks_with_other_seeds_get_the_values_of_the_first():
    run_ranks(2, check_first_ranks_values)


def most_unsharded() -> int:
    """Return the most elements in memory at a time, over construction and initialization of many layers."""
    most = 0
    data = Mesh.create(tensor_size=1).data

    class MeasuringLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)  # 272 elements
            nonlocal most
            most = max(most, sum(p.untyped_storage().size() // 4 for p in params if p.untyped_storage().size() > 4))
            params.extend(self.linear._parameters[name] for name in ("weight", "bias"))

    params: list[nn.Parameter] = []
    with ShardedInit(data, STAGE_3.policy, unsharded_numel=2000) as init:
        module = nn.ModuleList(MeasuringLayer() for _ in range(20))
        for param in module.parameters():
            param.data.normal_()
            most = max(most, sum(p.untyped_storage().size() // 4 for p in params if p.untyped_storage().size() > 4))
    ZeroDataParallel(module, data, STAGE_3, init=init)
    return most


def test_no_more_is_unsharded_than_the_limit():
    for most in run_ranks(2, most_unsharded):
        assert 2000 - 272 < most <= 2000 + 272  # the newest is made before an older one is sharded


def test_a_model_without_its_init_is_refused():
    with ShardedInit(Axis.trivial("data"), STAGE_3.policy):
        module = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) is still sharded; pass `init=`"):
        ZeroDataParallel(module, Axis.trivial("data"), STAGE_3)


def test_an_init_that_raises_leaves_torch_as_it_was():
    with pytest.raises(KeyError), ShardedInit(Axis.trivial("data"), STAGE_3.policy):
        raise KeyError
    assert type(nn.Linear(3, 2)._parameters) is dict


def test_copies_of_a_module_are_plain():
    with ShardedInit(Axis.trivial("data"), STAGE_3.policy) as init:
        module = nn.Linear(3, 2)
    model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1), init=init)
    assert_same_bits(params_of(model), dict(copy.deepcopy(module).named_parameters()))
