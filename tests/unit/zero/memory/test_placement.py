"""Memory of copies, and what the host may do with it, by the checker of streams."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from lab.observe.memory_tracker import MemoryTracker
from lab.races.stream_checker import StreamError, streams_checked
from parallel.memory_kinds import TensorKind
from parallel.mesh import Work
from parallel.validation.errors import MemoryLimitError
from zero.core.memory.allocators import host_allocator
from zero.core.protocols.home import Home
from zero.homes.on_host import OnHost

CPU = torch.device("cpu")


def copy_to_host(home: Home, on_host: Tensor) -> Work:
    return home.store(torch.ones(4), out=on_host)


def copy_to_accelerator(home: Home, on_host: Tensor) -> Work:
    return home.fetch(on_host, out=torch.empty(4))


@pytest.mark.parametrize("copy", [copy_to_host, copy_to_accelerator])
@pytest.mark.parametrize("waits", [True, False])
def test_the_host_overwrites_memory_of_a_copy_only_after_settle(copy: Callable[..., Work], waits: bool):
    with nullcontext() if waits else pytest.raises(StreamError, match="zero_ by the host"), streams_checked(CPU):
        home = OnHost(CPU)
        on_host = home.new(TensorKind.BUFFERS, 4, torch.float32)
        copied = copy(home, on_host)
        if waits:
            home.settle()
            assert not home._landing, "a later copy would wait for this one"
        on_host.zero_()
        copied.wait()


@pytest.mark.parametrize("is_source", [True, False])
def test_a_copy_to_the_accelerator_waits_for_the_copy_that_wrote_its_source_only(is_source: bool):
    """Behind the copy, something writes memory that a copy to the host writes: a race unless it waits for that copy."""

    def overwrite(written: Tensor) -> Work:
        written.copy_(torch.zeros(4), non_blocking=True)
        return Work()

    with nullcontext() if is_source else pytest.raises(StreamError, match="copy_"), streams_checked(CPU):
        home = OnHost(CPU)
        written, other = (home.new(TensorKind.BUFFERS, 4, torch.float32) for _ in range(2))
        other.zero_()
        to_host = home.store(torch.ones(4), out=written)
        source = written if is_source else other
        home.fetch(source, out=torch.empty(4), then=lambda: overwrite(written)).wait()
        to_host.wait()
        home.settle()


def test_the_host_casts_what_a_copy_to_it_has_written():
    with streams_checked(CPU):
        home = OnHost(CPU)
        on_host = home.new(TensorKind.BUFFERS, 4, torch.float32)
        to_host = home.store(torch.ones(4), out=on_host)
        home.fetch(on_host, out=torch.empty(4, dtype=torch.bfloat16)).wait()
        to_host.wait()


def read(home: Home, *numels: int, dtype: torch.dtype = torch.float32) -> int:
    """Read tensors of these sizes on the host; return how many times host memory was allocated for that."""
    sources = [torch.full((numel,), float(number), dtype=dtype) for number, numel in enumerate(numels)]
    with MemoryTracker(CPU) as tracker:
        for source, copy in zip(sources, home.read(sources), strict=True):
            assert copy.equal(source)
            assert copy is not source
        return tracker.host.num_allocations[TensorKind.BUFFERS]


def test_the_host_reads_through_two_buffers_that_are_used_again():
    home = OnHost(CPU)
    assert read(home) == 0
    assert read(home, 4) == 1
    assert read(home, 4, 4, 3, 4, 2) == 1
    assert read(home, 4, 5) == 1  # the second buffer is too small
    assert read(home, 4, 5, 4, 5) == 0
    assert read(home, 4, 4, 4, dtype=torch.bfloat16) == 2


def test_what_the_accelerator_reads_is_not_copied():
    sources = [torch.ones(2), torch.ones(3)]
    found = list(Home(CPU).read(sources))
    assert list(map(id, found)) == list(map(id, sources))
    (scalar,) = Home(CPU).scalars(sources[0][0])
    assert scalar.data_ptr() == sources[0].data_ptr()
    first, second = OnHost(CPU).scalars(torch.tensor(2.0), torch.tensor(3, dtype=torch.int32))
    assert (first.item(), second.item(), first.dim(), second.dtype) == (2.0, 3, 0, torch.int32)


def cast(home: Home, *numels: int) -> int:
    """Copy fp32 tensors of the host as bf16 ones; return how many times host memory was allocated for the casts."""
    sources = [torch.full((numel,), 1.0 + number) for number, numel in enumerate(numels)]
    outputs = [torch.empty(numel, dtype=torch.bfloat16) for numel in numels]
    with MemoryTracker(CPU) as tracker:
        copies = [home.fetch(source, out) for source, out in zip(sources, outputs, strict=True)]
        for source, out, copied in zip(sources, outputs, copies, strict=True):
            copied.wait()
            assert out.equal(source.to(torch.bfloat16))
        return tracker.host.num_allocations[TensorKind.BUFFERS]


def test_casts_on_their_way_to_the_accelerator_take_two_buffers_in_turn():
    home = OnHost(CPU)
    assert cast(home, 4, 4) == 2
    assert cast(home, 4, 3, 4, 4) == 0
    assert cast(home, 5) == 1  # in place of a smaller one
    assert cast(home, 4, 5, 4, 5) == 0


def test_host_memory_that_cannot_be_allocated_is_an_error_with_its_size():
    with pytest.raises(MemoryLimitError, match=r"1\.13e\+06 GB of host memory for moments"):
        host_allocator(CPU, TensorKind.MOMENTS)(2**50 // 4, torch.float32)
