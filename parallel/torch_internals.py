"""The private parts of torch that this project uses, each with the reason why nothing public serves.

No other module of `parallel` uses them. tests/unit/parallel/test_torch_internals.py has a test for each, which fails if
a new torch behaves differently. What every operation calls is torch's own object under a public name: a wrapper
function would add a call to every operation.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _PreserveDispatchKeyGuard as PreserveDispatchKeys
from torch._C import _set_meta_in_tls_dispatch_include as include_meta_in_dispatch
from torch._C import _set_throw_on_mutable_data_ptr as forbid_data_access
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = [
    "DEVICE_OF",
    "VIEWS_DESPITE_THEIR_SCHEMA",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "UnguardedDispatchMode",
    "UnguardedFakeTensorMode",
    "active_dispatch_modes",
    "active_observers",
    "attention_backend",
    "default_store",
    "fake_from_meta",
    "flatten_mesh",
    "flight_record",
    "is_composite",
    "largest_rounded_pinned_bytes",
    "memory_snapshot",
    "observe_host_reads",
    "observe_resizes",
    "real_tensors",
    "returns_views",
    "run_meta_kernel",
    "runs_a_kernel",
    "schema_of",
    "set_allocator",
    "storage_id",
    "take_default_timeout",
]

DEVICE_OF = torch.ops.prim.device.default  # the operation by which autograd asks a fake tensor for its device
NAMESPACES = {"aten", "torch_attn"}  # of kernels; the second one is that of attention with variable lengths
NO_KERNELS = {"empty", "empty_strided", "empty_like", "detach", "new_empty", "new_empty_strided", "_unsafe_view"}
# A dropout takes three kernels on a CPU and one on a GPU: only the one that multiplies is counted.
FUSED_ON_A_GPU = {"bernoulli_", "div_"}
VIEWS_DESPITE_THEIR_SCHEMA = {torch.ops.aten._unsafe_view.default}  # the schema says that the result is a new tensor


def attention_backend(query: Tensor, key: Tensor, dropout: float) -> SDPBackend:
    """Return the kernel that `scaled_dot_product_attention` runs for causal attention of such a query, key and value.

    The public functions of `torch.backends.cuda` say which kernels may run, and not which one is preferred.
    """
    is_grouped = key.shape[1] < query.shape[1]
    choice = torch._fused_sdp_choice(query, key, key, dropout_p=dropout, is_causal=True, enable_gqa=is_grouped)
    return SDPBackend(choice)


def default_store() -> dist.Store:
    """Return the store of the default process group.

    The launcher's store is wrapped in prefixes while the group is made, and no public function returns the result.
    """
    return dist.distributed_c10d._get_default_store()


def flatten_mesh(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    """Create and return the process group, called `name`, of all ranks of a mesh of several dims.

    `dist.new_group` would need a call for every group of the job, on all ranks; the mesh knows which groups these are.
    """
    return mesh._flatten(name).get_group()


def take_default_timeout(group: dist.ProcessGroup) -> None:
    """Give the collectives of a group that are launched from now on the time limit of the default group.

    A mesh passes no time limit to its groups, which get torch's constant, and no public function changes it.
    """
    default = dist.distributed_c10d._get_default_group()
    if group is not default and dist.get_backend(group) != "fake":
        options = default._get_backend(default._device_types[0]).options
        dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def flight_record() -> bytes | None:
    """Return torch's record of the last collectives of NCCL, for its analyzer `torchfrtrace`; None without NCCL.

    Torch itself writes it only if NCCL's own time limit has passed, or if a pipe asks for it.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return dump() if dump and torch.cuda.is_initialized() else None


def set_allocator(options: str) -> bool:
    """Set options of torch's allocators, as in PYTORCH_ALLOC_CONF; return False if torch does not know all of them.

    Torch reads the variable when it is imported or first allocates, which a program cannot precede.
    """
    try:
        torch._C._accelerator_setAllocatorSettings(options)
    except (RuntimeError, ValueError):
        return False
    return True


def largest_rounded_pinned_bytes() -> float:
    """Return the size of pinned memory up to which torch rounds it up to a power of two; infinity without a limit."""
    options = torch._C._accelerator_getAllocatorSettings()
    found = re.search(r"pinned_max_round_threshold_mb:(\d+)", options.replace(" ", ""))
    return int(found[1]) * 2**20 if found else math.inf


def memory_snapshot(path: Path) -> None:
    """Write a snapshot of the CUDA allocator's memory, which https://pytorch.org/memory_viz displays."""
    torch.cuda.memory._dump_snapshot(str(path))


def schema_of(operation: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an operation: which arguments it writes to, and which results alias an argument.

    An operation has no public attribute that says so.
    """
    return operation._schema


def returns_views(operation: OpOverload) -> bool:
    """Return True if all results of an operation are views of its arguments, by its schema."""
    aliases = [result.alias_info for result in schema_of(operation).returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def runs_a_kernel(operation: OpOverload) -> bool:
    """Return True if a GPU runs a kernel for the operation."""
    is_counted = operation.namespace in NAMESPACES and not returns_views(operation)
    return is_counted and schema_of(operation).name.removeprefix("aten::") not in NO_KERNELS | FUSED_ON_A_GPU


def is_composite(operation: OpOverload) -> bool:
    """Return True if torch implements the operation, under autograd, as a sequence of other operations.

    The schema of a composite may say that it returns a view although it copies, as `reshape` does.
    """
    return operation.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that all Python objects of one storage share, unique as long as the storage exists.

    `id` differs between Python objects, and fake storages have no `data_ptr`.
    """
    return storage._cdata


def active_dispatch_modes() -> list[TorchDispatchMode]:
    """Return the dispatch modes that see operations of this thread, the innermost one last.

    An observer joins a mode that is active already, since each further mode costs more than a fake operation.
    """
    return _get_current_dispatch_mode_stack()


def active_observers() -> list[Any]:
    """Return the observers of this thread's operations, the innermost one last: those in the lists of its modes."""
    return [observer for mode in active_dispatch_modes() for observer in getattr(mode, "observers", ())]


@contextmanager
def real_tensors() -> Iterator[None]:
    """Create real tensors in this block, also in a dry run: for code that must read values."""
    with unset_fake_temporarily():
        yield


class UnguardedDispatchMode(TorchDispatchMode):
    """A dispatch mode without Dynamo's guard, which doubles the time of an operation.

    No code is compiled while one is active.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # read when a subclass is created: True would wrap its __torch_dispatch__ in the guard


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
