"""A mesh of one rank, meshes that cannot be, handles and receive buffers: what needs no second rank."""

import pytest
import torch

from parallel.errors import ConfigError
from parallel.mesh import Handle, Mesh, ReceiveBuffers
from tests.ranks import run_ranks


def test_a_process_alone_has_trivial_axes_with_one_log():
    mesh = Mesh.create(tensor_size=1)
    assert (mesh.data.size, mesh.data.rank, mesh.tensor.size, mesh.tensor.rank) == (1, 0, 1, 0)
    assert mesh.data.log is mesh.tensor.log is mesh.log
    mesh.barrier()


@pytest.mark.parametrize("tensor_size", [2, 0, -1])
def test_one_rank_has_no_tensor_axis(tensor_size):
    with pytest.raises(
        ConfigError, match=rf"parallel\.tensor_size={tensor_size} does not divide the 1 ranks; choose 1,"
    ):
        Mesh.create(tensor_size)


def check_refusals() -> None:
    for tensor_size in (3, 8, 0):
        message = rf"parallel\.tensor_size={tensor_size} does not divide the 4 ranks; choose 1, 2, 4, or start another"
        with pytest.raises(ConfigError, match=message):
            Mesh.create(tensor_size)


def test_a_tensor_size_that_does_not_divide_the_ranks_is_refused():
    run_ranks(4, check_refusals)


def test_a_handle_takes_its_steps_once_and_in_order():
    taken = []
    handle = Handle(lambda: taken.append(1), lambda: taken.append(2))
    handle.wait()
    handle.wait()
    assert taken == [1, 2]


def test_what_follows_is_launched_now_if_nothing_is_awaited_and_else_when_waited_for():
    taken = []

    def launch() -> Handle:
        taken.append("launched")
        return Handle(lambda: taken.append("done"))

    chained = Handle().then(launch)
    assert taken == ["launched"]
    chained.wait()
    assert taken == ["launched", "done"]

    taken.clear()
    chained = Handle(lambda: taken.append("first")).then(launch)
    assert taken == []
    chained.wait()
    assert taken == ["first", "launched", "done"]


def test_receive_buffers_are_used_again_by_messages_of_their_size_and_type():
    buffers = ReceiveBuffers()
    first = buffers.take(torch.zeros(6))
    assert buffers.take(torch.zeros(6)).data_ptr() != first.data_ptr()  # the first is still in use
    buffers.put_back(first)
    assert buffers.num_bytes == 24
    assert buffers.take(torch.zeros(2, 3)).data_ptr() == first.data_ptr()
    for other in (torch.zeros(6).half(), torch.zeros(5)):
        assert buffers.take(other).dtype == other.dtype


def test_receive_buffers_are_as_many_as_travel_at_once_and_as_long_as_the_longest_message():
    buffers = ReceiveBuffers()
    for numel in (5, 1000, 30, 999, 7, 1000):
        together = [buffers.take(torch.zeros(n)) for n in (numel, 20)]
        assert together[0].numel() >= numel
        assert together[1].numel() >= 20
        assert together[0].data_ptr() != together[1].data_ptr()
        for buffer in together:
            buffers.put_back(buffer)
    assert buffers.num_bytes <= 4 * 2 * 1000
    for numel in range(1000, 1100):
        buffers.put_back(buffers.take(torch.zeros(numel)))
    assert buffers.num_bytes <= 4 * 2 * 1100, "a longer one takes the place of a shorter one"
    buffers.clear()
    assert buffers.num_bytes == 0
