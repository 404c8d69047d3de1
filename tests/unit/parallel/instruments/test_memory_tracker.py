"""The ledger against bytes known beforehand."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from parallel.instruments.memory_tracker import Kind, Ledger, allocating, tagged

CPU = torch.device("cpu")


@pytest.fixture(params=["real", "fake"], autouse=True)
def tensor_mode(request):
    with FakeTensorMode() if request.param == "fake" else nullcontext():
        yield


def test_views_share_a_storage_which_dies_with_the_last():
    with Ledger(CPU) as ledger:
        whole = torch.empty(1000)
        view = whole.view(10, 100)[3:]
        del whole
        assert ledger.device.total == 4000
        view.add_(1)
        del view
        assert ledger.device.total == 0
        assert ledger.device.peak_total == 4000
        assert ledger.device.num_allocations == {Kind.OTHER: 1}


def test_a_storage_may_be_resized():
    with Ledger(CPU) as ledger:
        tensor = tagged(Kind.PARAMETERS, torch.empty(100))
        tensor.untyped_storage().resize_(0)
        assert ledger.device.total == 0
        ledger.restart()
        tensor.untyped_storage().resize_(400)
        assert ledger.device.resident[Kind.PARAMETERS] == 400
        assert ledger.device.num_allocations[Kind.PARAMETERS] == 1
        assert ledger.device.peak_total == 400
    tensor.untyped_storage().resize_(0)  # nobody looks any more
    assert ledger.device.total == 400


def test_a_tag_takes_the_bytes_and_the_allocation_along():
    with Ledger(CPU) as ledger:
        with allocating(Kind.ACTIVATIONS):
            with allocating(Kind.BUFFERS):
                buffer = torch.empty(10)
            kept, offloaded, activation = torch.empty(20), torch.empty(40), torch.empty(80)
        tagged(Kind.CHECKPOINTS, kept[5:])
        tagged(Kind.CHECKPOINTS, offloaded, on_host=True)
        assert +ledger.device.resident == {Kind.BUFFERS: 40, Kind.CHECKPOINTS: 80, Kind.ACTIVATIONS: 320}
        assert +ledger.device.num_allocations == {Kind.BUFFERS: 1, Kind.CHECKPOINTS: 1, Kind.ACTIVATIONS: 1}
        assert +ledger.host.resident == {Kind.CHECKPOINTS: 160}
        ledger.restart()
        tagged(Kind.BUFFERS, activation)
        assert +ledger.device.num_allocations == {}, "it was allocated before"
        assert ledger.host.total == 160
        del buffer, kept, offloaded, activation
        assert ledger.device.total == ledger.host.total == 0


def test_the_peak_is_told_by_kind():
    with Ledger(CPU) as ledger:
        parameter = tagged(Kind.PARAMETERS, torch.empty(10))
        with allocating(Kind.ACTIVATIONS):
            temporary = torch.empty(100)
        del temporary
        later = tagged(Kind.GRADIENTS, torch.empty(50))
        assert +ledger.device.peak == {Kind.PARAMETERS: 40, Kind.ACTIVATIONS: 400}
        del later
        ledger.restart()
        assert +ledger.device.peak == {Kind.PARAMETERS: 40}
        higher = tagged(Kind.GRADIENTS, torch.empty(10))
        assert +ledger.device.peak == {Kind.PARAMETERS: 40, Kind.GRADIENTS: 40}
        del parameter, higher


def test_activations_between_forward_and_backward():
    """Autograd keeps the input of gelu and that of the second product, (8, 64) each; that of the first is given."""
    x = torch.randn(8, 32)
    with Ledger(CPU) as ledger:
        with allocating(Kind.PARAMETERS):
            first, second = nn.Linear(32, 64), nn.Linear(64, 16)
        with allocating(Kind.ACTIVATIONS):
            loss = second(F.gelu(first(x))).sum()
        assert +ledger.device.resident == {
            Kind.PARAMETERS: 4 * (64 * 32 + 64 + 16 * 64 + 16),
            Kind.ACTIVATIONS: 4 * (2 * 8 * 64 + loss.numel()),
        }
        loss.backward()
        assert ledger.device.resident[Kind.ACTIVATIONS] == 4


def test_without_a_ledger_tags_do_nothing():
    tensor = torch.empty(3)
    with allocating(Kind.BUFFERS):
        assert tagged(Kind.BUFFERS, tensor) is tensor
