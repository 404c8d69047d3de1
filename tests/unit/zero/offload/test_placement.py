"""Memory of copies, and what the host may do with it, by the checker of streams."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from parallel.instruments.memory_tracker import TensorKind
from parallel.instruments.stream_checker import StreamError, streams_checked
from parallel.mesh import Handle
from zero.offload.placement import Offload, Placement

CPU = torch.device("cpu")


def copy_to_host(offload: Offload, on_host: Tensor) -> Handle:
    return offload.to_host(torch.ones(4), out=on_host)


def copy_to_accelerator(offload: Offload, on_host: Tensor) -> Handle:
    return offload.to_accelerator(on_host, out=torch.empty(4))


@pytest.mark.parametrize("copy", [copy_to_host, copy_to_accelerator])
@pytest.mark.parametrize("waits", [True, False])
def test_the_host_overwrites_memory_of_a_copy_only_after_synchronize(copy: Callable[..., Handle], waits: bool):
    with nullcontext() if waits else pytest.raises(StreamError, match="zero_ by the host"), streams_checked(CPU):
        offload = Offload(CPU)
        on_host = offload.new(Placement.HOST, TensorKind.BUFFERS, 4, torch.float32)
        copied = copy(offload, on_host)
        if waits:
            offload.synchronize()
        on_host.zero_()
        copied.wait()


@pytest.mark.parametrize("is_source", [True, False])
def test_a_copy_to_the_accelerator_waits_for_the_copy_that_wrote_its_source_only(is_source: bool):
    """Behind the copy, something writes memory that a copy to the host writes: a race unless it waits for that copy."""

    def overwrite(written: Tensor) -> Handle:
        written.copy_(torch.zeros(4), non_blocking=True)
        return Handle()

    with nullcontext() if is_source else pytest.raises(StreamError, match="copy_"), streams_checked(CPU):
        offload = Offload(CPU)
        written, other = (offload.new(Placement.HOST, TensorKind.BUFFERS, 4, torch.float32) for _ in range(2))
        other.zero_()
        to_host = offload.to_host(torch.ones(4), out=written)
        source = written if is_source else other
        offload.to_accelerator(source, out=torch.empty(4), then=lambda: overwrite(written)).wait()
        to_host.wait()
        offload.synchronize()
