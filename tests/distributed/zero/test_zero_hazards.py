"""Hazards of data parallelism that a plain run does not show: order, accumulation, unused parameters, failures."""

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel.mesh import Axis, Mesh
from tests.distributed.zero.test_zero_equals_one_process import case_of, train_with_zero
from tests.models import build
from tests.ranks import run_ranks
from tests.twins import ALL_STAGES, Twins, assert_same_bits, check_all, configs, next_token_loss
from zero.core.partition.stage import Lifetime
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig


def toy_twins(config: ZeroConfig) -> Twins:
    return Twins(build("toy"), config, lr=1e-2)


def params_after_training(**combination: Any) -> dict[str, Tensor]:
    return train_with_zero(case_of(**combination)).params


def check_overlap_never_changes_a_bit(dtype: torch.dtype) -> dict[int, dict[str, Tensor]]:
    """Check it, and that a second run in stage 3 gives the same bits; return the parameters by stage."""
    results = {}
    for stage in ALL_STAGES if dist.get_world_size() == 2 else (0, 3):
        settings = {"name": "toy", "stage": stage, "bucket_numel": 4000, "num_micro_batches": 2, "dtype": dtype}
        on, off = (params_after_training(**settings, overlap=overlap) for overlap in (True, False))
        assert_same_bits(off, on)
        results[stage] = on
    assert_same_bits(params_after_training(**settings), on)
    return results


@pytest.mark.parametrize(("data_size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_overlap_and_repetition_give_the_same_bits_on_all_ranks(data_size, dtype):
    first, *others = run_ranks(data_size, check_overlap_never_changes_a_bit, dtype)
    for other, stage in itertools.product(others, first):
        assert_same_bits(other[stage], first[stage])


def check_stages_and_buckets_give_the_same_bits() -> None:
    """A sum of two terms has one order, so with two ranks even bf16 must agree, unless the norm is clipped."""
    settings = {"reduce_dtype": "bf16", "dtype": torch.bfloat16, "clip_norm": None}
    cases = itertools.product(ALL_STAGES, [1000, None])
    found = [params_after_training(name="toy", stage=stage, bucket_numel=n, **settings) for stage, n in cases]
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_stages_and_buckets_give_the_same_bits():
    run_ranks(2, check_stages_and_buckets_give_the_same_bits)


def is_transient(config: ZeroConfig) -> bool:
    return config.policy.full_grads is Lifetime.TRANSIENT


def check_a_second_backward(config: ZeroConfig) -> None:
    """Its gradients are added to owned shards that have memory of their own; else they would be lost, and it raises."""
    twins = toy_twins(config)
    twins.backward(0)
    if is_transient(config):
        twins.backward(1)
    else:
        with pytest.raises(ValueError, match=r"second backward .*accumulate\(\)"):
            next_token_loss(twins.model, 1, twins.data.rank).backward()
    twins.step()
    twins.train(1)


class FailingInBackward(nn.Linear):
    """A layer whose backward raises once, or the one that recomputes it."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.fails and output.requires_grad:
            output.register_hook(raise_on_purpose)
        return output


ENDS: dict[str, Callable[[ZeroDataParallel, ZeroOptimizer], object]] = {
    "gradients are discarded": lambda model, _: model.zero_grad(),
    "the optimizer discards them": lambda _, optimizer: optimizer.zero_grad(),
    "a forward": lambda model, _: torch.no_grad()(model)(torch.ones(1, 4)),
}


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_units_that_a_backward_has_left_when_it_raised_are_freed(name, is_nested):
    blocks = [FailingInBackward(4, 4) for _ in range(4)]
    config = ZeroConfig(3, units=["1", "2", "3"], prefetch_numel=0)
    model = ZeroDataParallel(nn.Sequential(*blocks), Axis.trivial("data"), config)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    transient = [flat for flat in model.flats if flat.lifetime is Lifetime.TRANSIENT]

    def run() -> Tensor:
        x = torch.ones(1, 4, requires_grad=True)
        return (checkpoint(model, x, use_reentrant=True) if is_nested else model(x)).sum()

    run().backward()
    optimizer.step()
    blocks[1].fails = True
    with pytest.raises(KeyError, match="on purpose"):
        run().backward()
    blocks[1].fails = False
    assert not all(flat.is_sharded for flat in transient)
    ENDS[name](model, optimizer)
    assert all(flat.is_sharded for flat in transient)
    optimizer.zero_grad()
    run().backward()
    assert optimizer.step() > 0


@pytest.mark.parametrize("stage", ALL_STAGES)
def test_a_backward_after_one_that_broke_off_is_refused_until_gradients_are_cleared(stage):
    """The second would add to gradients of the first."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = ZeroDataParallel(layers, Axis.trivial("data"), ZeroConfig(stage))

    def fail(_module: nn.Module, _args: tuple, output: Tensor) -> None:
        output.register_hook(raise_on_purpose)

    hook = layers[0].register_forward_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        model(torch.ones(1, 4)).sum().backward()
    hook.remove()
    with pytest.raises(ValueError, match=r"broke off; call `optimizer.zero_grad\(\)` before the next"):
        model(torch.ones(1, 4)).sum().backward()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="broke off"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    assert all(bucket.grads.total.has_sum for bucket in model.buckets)


def raise_on_purpose(_grad: Tensor) -> None:
    raise KeyError("on purpose")


@pytest.mark.parametrize(
    "zero_configs",
    [configs(*ALL_STAGES), configs(2, 3, overlap=[False], accumulate=["local"])],
    ids=["overlap", "no-overlap, local"],
)
def test_a_second_backward_is_added_or_refused(zero_configs):
    run_ranks(2, check_all, [check_a_second_backward], zero_configs)


def norm_if_replicas_add_otherwise() -> float:
    """Return the norm of a step in which all-reduces of the second replica end with other last bits.

    A backend may add the terms in another order there.
    """
    data, all_reduce = Mesh.create(tensor_size=1, shard_size=2).data, dist.all_reduce
    model = ZeroDataParallel(build("gpt"), data, ZeroConfig(2))
    optimizer = ZeroOptimizer(model, torch.optim.SGD, clip_norm=1e-3)
    next_token_loss(model, 0, data.rank).backward()

    def add_otherwise(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        (work := all_reduce(tensor, *args, **kwargs)).wait()
        if tensor.is_floating_point() and model.replica_axis.rank == 1:
            tensor.mul_(1 + 1e-15)
        return work

    with mock.patch.object(dist, "all_reduce", add_otherwise):
        return optimizer.step().item()


def test_replicas_clip_by_the_same_norm_in_whatever_order_a_backend_adds():
    assert len(set(run_ranks(4, norm_if_replicas_add_otherwise))) == 1
