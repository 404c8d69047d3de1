"""Private parts of torch behave as the laboratory needs: a test for each part of lab/observe/torch_internals.py.

If one fails after an update of torch, the function that it tests is the place to adapt.
"""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from lab.observe import torch_internals as internals
from parallel.torch_internals import FakeTensor, TorchDispatchMode, UnguardedDispatchMode, schema_of, storage_id
from tests.unit.parallel.test_torch_internals import CountingMode

aten = torch.ops.aten
CPU = torch.device("cpu")


def test_some_views_are_new_tensors_by_their_schema():
    tensor = torch.ones(4, 6)
    for operation in internals.VIEWS_DESPITE_THEIR_SCHEMA:
        assert schema_of(operation).returns[0].alias_info is None
        assert operation(tensor, [6, 4]).data_ptr() == tensor.data_ptr()


def test_composites_are_recognized():
    assert internals.is_composite(aten.reshape.default)
    assert internals.is_composite(aten.matmul.default)
    assert not internals.is_composite(aten.view.default)
    assert not internals.is_composite(aten.mm.default)


@pytest.mark.parametrize(
    ("guarded", "unguarded"),
    [(TorchDispatchMode, UnguardedDispatchMode), (internals.FakeTensorMode, internals.UnguardedFakeTensorMode)],
)
def test_the_method_of_an_unguarded_mode_is_not_wrapped(guarded, unguarded):
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError

    def method_of(base: type) -> Any:
        return type("Mode", (base,), {"__torch_dispatch__": dispatch}).__dict__["__torch_dispatch__"]

    assert method_of(unguarded) is dispatch
    assert method_of(guarded) is not dispatch, "torch guards no mode any more: the unguarded ones can go"


def test_a_meta_kernel_gives_shapes_and_leaves_no_mark_behind():
    with internals.FakeTensorMode() as mode:
        x = torch.empty(4, 6)
    with mode, CountingMode() as counting:
        view = internals.run_meta_kernel(mode, aten.view.default, (x, [6, 4]), {})
    assert (type(view), view.device.type, view.shape) == (torch.Tensor, "meta", (6, 4))
    assert storage_id(view.untyped_storage()) == storage_id(x.untyped_storage())
    assert counting.seen == [], "no mode sees what happens in a kernel"
    with pytest.raises(RuntimeError, match="shape"):
        internals.run_meta_kernel(mode, aten.view.default, (x, [5, 5]), {})
    for _ in range(2):
        assert not mode.in_kernel_invocation
        assert torch.empty(3).add(1).tolist() != [], "real tensors still have values"
        with mode:
            assert x.add(1).device == CPU
            assert (x @ x.t()).shape == (4, 4)


def test_a_fake_tensor_from_attributes_equals_torchs_own():
    mode = internals.FakeTensorMode()
    meta = torch.empty_strided((4, 6), (1, 4), dtype=torch.bfloat16, device="meta")
    expected = FakeTensor(mode, meta, CPU)
    made = internals.fake_from_meta(meta, CPU, expected.__dict__)
    assert type(made) is FakeTensor
    assert made.__dict__ == expected.__dict__
    assert {"constant", "fake_device", "fake_mode"} <= set(dir(made))
    assert (made.constant, made.fake_device, made.fake_mode) == (None, CPU, mode)
    for found in (made, expected):
        assert (found.device, found.dtype, found.stride(), found.is_leaf) == (CPU, torch.bfloat16, (1, 4), True)
        with pytest.raises(RuntimeError, match="data"):
            found.data_ptr()
        with mode:
            assert (found + 1).shape == (4, 6)
            weight = nn.Parameter(found)
            (weight * 2).sum().backward()
            assert weight.grad is not None


def test_autograd_asks_a_fake_tensor_for_its_device_by_this_operation():
    seen: list[Any] = []

    class Mode(internals.UnguardedFakeTensorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return self.dispatch(func, types, args, kwargs or {})

    with Mode():
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
        assert internals.DEVICE_OF(x.detach()) == CPU
    assert internals.DEVICE_OF in seen[:-1]


def resized(observed: list[int]) -> list[int]:
    """The sizes that were observed while a storage was resized to 8 bytes."""
    observed.clear()
    torch.empty(4).untyped_storage().resize_(8)
    return observed.copy()


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_resizes_are_observed_until_the_last_block_ends_in_whatever_order(first_to_end):
    observed: list[int] = []
    blocks = [ExitStack(), ExitStack()]
    for block in blocks:
        block.enter_context(internals.observe_resizes(lambda _storage, num_bytes: observed.append(num_bytes)))
    assert resized(observed) == [8, 8]
    blocks[first_to_end].close()
    assert resized(observed) == [8]
    blocks[1 - first_to_end].close()
    assert resized(observed) == []
    assert "resize_" not in vars(torch.UntypedStorage)


def test_resizes_are_no_longer_observed_after_an_exception():
    observed: list[int] = []
    with pytest.raises(KeyError), internals.observe_resizes(lambda _storage, num_bytes: observed.append(num_bytes)):
        raise KeyError
    assert resized(observed) == []


def test_host_reads_are_observed_until_the_block_ends():
    observed: list[torch.Tensor] = []
    tensor = torch.arange(3)
    with internals.observe_host_reads(observed.append):
        assert tensor.numpy().tolist() == tensor.tolist() == [0, 1, 2]
    assert [id(read) for read in observed] == [id(tensor)] * 2
    tensor.tolist()
    assert len(observed) == 2
    assert not {"numpy", "tolist"} & vars(torch.Tensor).keys()
