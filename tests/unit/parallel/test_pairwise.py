"""Receive buffers are reused, grow with the messages, and come from an allocator; sums are rounded once."""

import pytest
import torch

from lab.observe.memory_tracker import MemoryTracker
from parallel.memory_kinds import TensorKind, allocate_buffer
from parallel.pairwise import ReceiveBuffers, sum_ranks


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


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_terms_of_any_number_of_ranks_are_summed_and_rounded_once(num_ranks: int, dtype: torch.dtype):
    terms = torch.randn(num_ranks, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = torch.empty(1000, dtype=dtype)
    sum_ranks(terms, found)
    assert found.equal(terms.float().sum(0).to(dtype))
    assert torch.allclose(found.double(), terms.double().sum(0), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
