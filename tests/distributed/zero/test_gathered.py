"""Chosen parameters are unsharded to be read, or to be changed on every rank and in the optimizer."""

import pytest
import torch
from torch import nn

from parallel.mesh import Axis, Mesh
from tests.models import build
from tests.ranks import run_ranks
from tests.twins import ALL_STAGES, Twins, assert_same_bits, check_all, configs, params_of
from zero.core.buckets.guard import ShardedParameterError
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig


def chosen(module: nn.Module) -> list[nn.Parameter]:
    """Return four kinds of parameters: tied, larger than a bucket, frozen, and small in a block."""
    return [module.tokens.weight, module.large.weight, module.blocks[1].frozen, module.blocks[0].norm.bias]


def check_changes_reach_ranks_and_optimizer(config: ZeroConfig) -> None:
    twins = Twins(build("toy"), config, lr=1e-2)
    twins.train(1)
    for param in chosen(twins.model.module):  # one at a time, as if the model were too large to be unsharded at once
        with twins.model.gathered([param], modify=True):
            param.mul_(2 if twins.data.rank == 0 else 1e9)
    for param in chosen(twins.plain):
        param.data.mul_(2)
    twins.assert_alike()
    with twins.model.gathered(iter([twins.model.module.bias]), modify=True):
        twins.model.module.bias.data = torch.ones(16, dtype=torch.float64)
    twins.plain.bias.data.fill_(1.0)
    twins.train(2, first=1)


def test_changed_parameters_train_on_as_in_one_process():
    run_ranks(2, check_all, [check_changes_reach_ranks_and_optimizer], configs(*ALL_STAGES, bucket_numel=[1500, None]))


def check_master_weights_keep_hidden_digits(config: ZeroConfig) -> None:
    """Change one element: all others keep the digits that rounding to bf16 hides."""
    data = Mesh.create(tensor_size=1).data
    model = ZeroDataParallel(nn.Linear(20, 3).bfloat16(), data, config)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=1.0)
    for bucket in optimizer.buckets:
        bucket.master.mul_(1 + 2**-12)  # hidden by rounding to bf16
    fine = [bucket.master.clone() for bucket in optimizer.buckets]
    weight = model.module.weight
    with model.gathered([weight], modify=True):
        weight[1, 4] = 7.0
    differing = [bucket.master[bucket.master != before] for bucket, before in zip(optimizer.buckets, fine, strict=True)]
    num_differing = torch.tensor([float(torch.cat(differing).numel())])
    model.shard_axis.all_reduce(num_differing, out=num_differing).wait()
    assert num_differing == 1
    assert all((values == 7.0).all() for values in differing)
    assert params_of(model)["weight"][1, 4] == 7.0


def test_master_weights_keep_elements_that_were_not_changed():
    run_ranks(2, check_all, [check_master_weights_keep_hidden_digits], configs(*ALL_STAGES, bucket_numel=[40]))


def is_refused(param: nn.Parameter) -> bool:
    with pytest.raises(ShardedParameterError):
        param.isnan()
    return True


def check_only_chosen_units_are_unsharded(config: ZeroConfig) -> None:
    """Check it inside another context, and while a block runs that the context keeps unsharded."""
    module = build("toy")
    expected = {name: param.detach().clone() for name, param in module.named_parameters()}
    model = ZeroDataParallel(module, Mesh.create(tensor_size=1).data, config)
    weight, other = module.blocks[1].up.weight, module.blocks[2].up.weight
    with model.gathered([weight]):
        with model.gathered([weight, module.bias]) as inner:
            assert inner is module
        model(torch.zeros(1, 5, dtype=torch.int64))
        assert weight.equal(expected["blocks.1.up.weight"])
        assert is_refused(other)
    assert is_refused(weight)
    assert_same_bits(params_of(model), expected)


def test_parameters_are_unsharded_and_resharded_by_unit():
    run_ranks(2, check_all, [check_only_chosen_units_are_unsharded], configs(3))


def test_parameters_of_another_model_are_refused():
    model = ZeroDataParallel(nn.Linear(3, 2), Axis.trivial("data"), ZeroConfig(3))
    with (
        pytest.raises(ValueError, match=r"shape \(5,\) is not a parameter of this model"),
        model.gathered([nn.Parameter(torch.zeros(5))]),
    ):
        pass
