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
