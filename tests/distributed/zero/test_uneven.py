"""The turns of ranks that run out of batches first. How they train is in `scenarios/test_ranks.py`."""

import torch
from torch import Tensor

from parallel.comm_log import CommLog
from parallel.mesh import Axis, Mesh
from tests.ranks import run_ranks
from tests.unit.zero.step.test_loss_scale import CopiesToHost
from zero.core.memory.streams import SideStream
from zero.uneven import _Exchange, join


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
