"""Receive buffers are reused, grow with the messages, and come from the allocator that was handed in."""

import torch

from lab.observe.memory_tracker import MemoryTracker
from parallel.memory_kinds import TensorKind, allocate_buffer
from parallel.receive_buffers import ReceiveBuffers


def test_buffers_are_reused_by_messages_of_their_size_and_dtype():
    buffers = ReceiveBuffers()
    first = buffers.take(torch.zeros(6))
    assert buffers.take(torch.zeros(6)).data_ptr() != first.data_ptr()  # the first is still in use
    buffers.put_back(first)
    assert buffers.num_bytes == 24
    assert buffers.take(torch.zeros(2, 3)).data_ptr() == first.data_ptr()
    for other in (torch.zeros(6).half(), torch.zeros(5)):
        assert buffers.take(other).dtype == other.dtype


def test_there_are_as_many_buffers_as_concurrent_messages_and_each_is_as_long_as_the_longest():
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


def test_a_memory_tracker_counts_what_its_allocator_makes_as_buffers():
    with MemoryTracker(torch.device("cpu")) as tracker:
        message = torch.zeros(6)
        buffer = ReceiveBuffers(allocate_buffer).take(message)
        assert tracker.device.resident[TensorKind.BUFFERS] == buffer.nbytes == 24
        assert tracker.device.resident[TensorKind.OTHER] == message.nbytes
