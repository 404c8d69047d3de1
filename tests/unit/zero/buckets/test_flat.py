"""A flat buffer whose all-gathers end as late as they may: nothing is read or freed before they have ended."""

from dataclasses import dataclass
from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn

from parallel.comm_log import CommLog
from parallel.mesh import Axis, Work
from zero.chosen import homes_of
from zero.core.buckets.flat import FlatContext, FlatParameters, absent, is_absent
from zero.core.buckets.guard import ParameterGuard
from zero.core.memory.streams import SideStream
from zero.core.partition.stage import Lifetime
from zero.core.protocols.transport import Direct
from zero.settings.config import NO_OFFLOAD, ZeroConfig


@dataclass(frozen=True)
class LateAxis(Axis):
    """The first of two ranks that own the same values; a message is written when its `Work` is waited for."""

    def all_gather(self, shard: Tensor, *, out: Tensor) -> Work:
        def arrive() -> None:
            assert out.untyped_storage().nbytes() > 0, "freed while a message was on its way"
            out.copy_(shard.repeat(2))

        return Work(arrive)


class NotedReads:
    """The parameters of which a read has been reported."""

    def __init__(self) -> None:
        self.params: list[int] = []

    def before_read(self, param: nn.Parameter) -> None:
        self.params.append(id(param))

    def after_saving(self, param: nn.Parameter) -> None: ...


def flat_parameters(reads: NotedReads) -> FlatParameters:
    """Make a buffer of two buckets of 32 elements, a parameter in each; each rank owns 16 of a bucket."""
    half = torch.arange(32.0)
    params = {"first": nn.Parameter(half.view(4, 8).clone()), "second": nn.Parameter(half.clone())}
    guard = ParameterGuard({param: name for name, param in params.items()}, reads)
    config, device = ZeroConfig(3), torch.device("cpu")
    transport = Direct(LateAxis("data", 2, 0, CommLog())).open(device, keeps_full=False)
    context = FlatContext(config, 32, homes_of(NO_OFFLOAD, device), guard, SideStream(device))
    return FlatParameters(params, Lifetime.TRANSIENT, attrgetter("data"), transport, context)


def test_reshard_waits_for_running_gathers_before_it_frees_the_buffer():
    reads = NotedReads()
    flat = flat_parameters(reads)
    first, second = flat.params
    for is_waited_for in (True, False, True):
        flat.start_unshard()
        if is_waited_for:
            flat.unshard()
            assert first.flatten().tolist() == second.tolist() == [*range(16)] * 2
        flat.reshard()
        assert flat.full.untyped_storage().nbytes() == 0
        assert reads.params == [], "nothing has read the values of a sharded parameter"
    assert first.isnan().all()  # a read of a sharded parameter is noticed, and does not crash the process


@pytest.mark.parametrize(
    ("data", "stands_for_values"),
    [
        (absent(torch.ones(1)).expand(2, 3), True),
        (absent(torch.ones(1)).expand(2), True),
        (torch.full((2, 3), torch.nan), False),
        (torch.full((1, 3), torch.nan).expand(2, 3), False),
        (torch.zeros(()).expand(2, 3), False),
        (torch.tensor(torch.nan), False),
        (absent(torch.ones(1, dtype=torch.int64)).expand(2), False),  # it reads as 0
    ],
)
def test_values_that_are_sharded_are_told_from_others(data: Tensor, stands_for_values: bool):
    assert is_absent(data) is stands_for_values
