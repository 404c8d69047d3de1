"""The private parts of torch that only the laboratory uses, each with the reason why nothing public serves.

tests/unit/lab/observe/test_torch_internals.py has a test for each, which fails if a new torch behaves differently.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _PreserveDispatchKeyGuard as PreserveDispatchKeys
from torch._C import _set_meta_in_tls_dispatch_include as include_meta_in_dispatch
from torch._C import _set_throw_on_mutable_data_ptr as forbid_data_access
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel.torch_internals import FakeTensor, OpOverload

DEVICE_OF = torch.ops.prim.device.default  # the operation by which autograd asks a fake tensor for its device
VIEWS_DESPITE_THEIR_SCHEMA = {torch.ops.aten._unsafe_view.default}  # the schema says that the result is a new tensor


def is_composite(operation: OpOverload) -> bool:
    """Return True if torch implements the operation, under autograd, as a sequence of other operations.

    The schema of a composite may say that it returns a view although it copies, as `reshape` does.
    """
    return operation.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


class UnguardedFakeTensorMode(FakeTensorMode):
    """A mode of fake tensors without Dynamo's guard."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def run_meta_kernel(mode: FakeTensorMode, operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation on the meta tensors inside fake tensors: its shape, dtype and strides.

    This is torch's `in_kernel_invocation_manager` without a generator, which takes longer than most meta kernels.
    """
    with DisableTorchDispatch(), PreserveDispatchKeys():
        # Both switches are set inside both guards. The first makes fake tensors report their meta device, the second
        # selects the meta kernel. The guards reset the second, `finally` the first: one that stays set would break
        # every later operation.
        mode.in_kernel_invocation = True
        include_meta_in_dispatch(True)
        try:
            return operation(*args, **kwargs)
        finally:
            mode.in_kernel_invocation = False


def fake_from_meta(meta: Tensor, device: torch.device, attributes: Mapping[str, Any]) -> FakeTensor:
    """Return a fake tensor on `device` around a meta tensor, with the attributes of another fake tensor there.

    The constructor of `FakeTensor` would compute these attributes again, which takes several times as long. Reading a
    value of the result raises.
    """
    fake = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    forbid_data_access(fake)
    fake.__dict__.update(attributes)
    return fake


def observe_resizes(observer: Callable[[torch.UntypedStorage, int], object]) -> AbstractContextManager[None]:
    """Call `observer` with every storage that is resized in a block, and its new size in bytes, after the resize.

    Resizing a storage is not an operation: no dispatch mode sees it.
    """
    return _observe_calls(torch.UntypedStorage, "resize_", observer)


@contextmanager
def observe_host_reads(observer: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `observer` with every tensor whose values Python or NumPy reads in this block, after the read.

    `numpy` and `tolist` of a tensor on the CPU are not operations: no dispatch mode sees them.
    """

    def observe(tensor: Tensor, *_args: Any, **_kwargs: Any) -> None:
        observer(tensor)

    with _observe_calls(Tensor, "numpy", observe), _observe_calls(Tensor, "tolist", observe):
        yield


@contextmanager
def _observe_calls(owner: type, name: str, observer: Callable[..., object]) -> Iterator[None]:
    """Call `observer` with the arguments of every call of a method that a class inherits from its base in C++.

    The method is replaced while at least one observer is active. Blocks may end in any order, also by exceptions; the
    last one to end restores the method.
    """
    observers: list[Callable] | None = getattr(getattr(owner, name), "observers", None)
    if observers is None:
        original, observers = getattr(owner, name), []

        def call_and_report(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            for observe in call_and_report.observers:  # type: ignore[attr-defined]
                observe(*args, **kwargs)
            return result

        call_and_report.observers = observers  # type: ignore[attr-defined]
        setattr(owner, name, call_and_report)
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)
        if not observers:
            delattr(owner, name)  # what remains is the method that the class inherits
