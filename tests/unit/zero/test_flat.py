"""A flat buffer whose messages arrive as late as they may: nothing is read, or freed, before it is there."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from parallel.instruments.comm_log import CommLog
from parallel.mesh import Axis, Handle
from zero.flat import FlatParameters
from zero.stage import STAGES, Lifetime


@dataclass(frozen=True)
class LateAxis(Axis):
    """The first of two ranks that own the same; a message is written when it is waited for."""

    arrived: list[Tensor] = field(default_factory=list, compare=False)

    def all_gather(self, shard: Tensor, *, out: Tensor) -> Handle:
        def arrive() -> None:
            assert out.untyped_storage().nbytes() > 0, "freed while a message was on its way"
            self.arrived.append(out.copy_(shard.repeat(2)))

        return Handle(arrive)


def flat_parameters(lifetime: Lifetime) -> FlatParameters:
    """Two equal halves of 32, one for each rank, in buckets of 32."""
    half = torch.arange(32.0)
    params = {"first": nn.Parameter(half.view(4, 8).clone()), "second": nn.Parameter(half.clone())}
    return FlatParameters(params, LateAxis("data", 2, 0, CommLog()), lifetime, 32, STAGES[3])


def test_parameters_come_and_go():
    flat = flat_parameters(Lifetime.TRANSIENT)
    first, second = flat.params
    for _ in range(2):
        assert flat.full.untyped_storage().nbytes() == 0
        assert first.shape == (4, 8)
        assert first.isnan().all()  # reads of sharded parameters are noticed, and do not end the process
        flat.start_unshard()
        flat.unshard()
        assert first.flatten().tolist() == [*range(16)] * 2
        assert second.tolist() == [*range(16)] * 2
        flat.reshard()


def test_what_is_on_its_way_arrives_before_it_is_freed():
    flat = flat_parameters(Lifetime.TRANSIENT)
    flat.start_unshard()
    assert flat.axis.arrived == []
    flat.reshard()
    assert len(flat.axis.arrived) == len(flat.buckets)
    assert flat.full.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("is_gathered", [True, False])
def test_new_values_replace_what_was_gathered(is_gathered):
    flat = flat_parameters(Lifetime.TRANSIENT)
    if is_gathered:
        flat.unshard()
    flat.reshard()
    for bucket in flat.buckets:
        bucket.params.owned.fill_(7.0)
        bucket.params.all_gather_updated().wait()
    flat.unshard()
    assert flat.params[0].eq(7.0).all()


def test_a_persistent_buffer_owns_a_part_of_itself():
    flat = flat_parameters(Lifetime.PERSISTENT)
    assert flat.buckets[0].params.owned.data_ptr() == flat.full.data_ptr() == flat.params[0].data_ptr()
    flat.buckets[1].params.owned.fill_(7.0)
    flat.buckets[1].params.all_gather_updated().wait()
    assert flat.params[1].eq(7.0).all()
    flat.reshard()
    assert flat.params[1].eq(7.0).all()
