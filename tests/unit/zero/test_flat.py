"""A flat buffer whose all-gathers end as late as they may: nothing is read or freed before they have ended."""

from dataclasses import dataclass, field
from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn

from parallel.instruments.comm_log import CommLog
from parallel.mesh import Axis, Handle
from zero.config import ZeroConfig
from zero.flat import FlatParameters
from zero.offload.placement import Offload
from zero.stage import Lifetime
from zero.units.guarded_parameter import ParameterGuard


@dataclass(frozen=True)
class LateAxis(Axis):
    """The first of two ranks that own the same values; a message is written when its handle is waited for."""

    arrived: list[Tensor] = field(default_factory=list, compare=False)

    def all_gather(self, shard: Tensor, *, out: Tensor) -> Handle:
        def arrive() -> None:
            assert out.untyped_storage().nbytes() > 0, "freed while a message was on its way"
            self.arrived.append(out.copy_(shard.repeat(2)))

        return Handle(arrive)


def flat_parameters(lifetime: Lifetime) -> FlatParameters:
    """Make a buffer of two buckets of 32 elements, a parameter in each; each rank owns 16 of a bucket."""
    half = torch.arange(32.0)
    params = {"first": nn.Parameter(half.view(4, 8).clone()), "second": nn.Parameter(half.clone())}
    axis, offload = LateAxis("data", 2, 0, CommLog()), Offload(torch.device("cpu"))
    guard = ParameterGuard({param: name for name, param in params.items()})
    return FlatParameters(params, axis, lifetime, 32, ZeroConfig(3), attrgetter("data"), offload, guard)


def test_unshard_fills_the_parameters_and_reshard_frees_them():
    flat = flat_parameters(Lifetime.TRANSIENT)
    first, second = flat.params
    for _ in range(2):
        assert flat.full.untyped_storage().nbytes() == 0
        assert first.shape == (4, 8)
        assert first.isnan().all()  # a read of a sharded parameter is noticed, and does not crash the process
        flat.start_unshard()
        flat.unshard()
        assert first.flatten().tolist() == [*range(16)] * 2
        assert second.tolist() == [*range(16)] * 2
        flat.reshard()


def test_reshard_waits_for_running_gathers_before_it_frees_the_buffer():
    flat = flat_parameters(Lifetime.TRANSIENT)
    flat.start_unshard()
    assert flat.axis.arrived == []
    flat.reshard()
    assert len(flat.axis.arrived) == len(flat.buckets)
    assert flat.full.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("was_unsharded", [True, False])
def test_unshard_after_an_update_fills_in_the_new_values(was_unsharded):
    flat = flat_parameters(Lifetime.TRANSIENT)
    if was_unsharded:
        flat.unshard()
    flat.reshard()
    for bucket in flat.buckets:
        bucket.params.owned.fill_(7.0)
        bucket.params.all_gather_updated().wait()
    flat.unshard()
    assert flat.params[0].eq(7.0).all()


def test_shards_of_a_persistent_buffer_are_parts_of_it_and_reshard_keeps_it():
    flat = flat_parameters(Lifetime.PERSISTENT)
    assert flat.buckets[0].params.owned.data_ptr() == flat.full.data_ptr() == flat.params[0].data_ptr()
    flat.buckets[1].params.owned.fill_(7.0)
    flat.buckets[1].params.all_gather_updated().wait()
    assert flat.params[1].eq(7.0).all()
    flat.reshard()
    assert flat.params[1].eq(7.0).all()
