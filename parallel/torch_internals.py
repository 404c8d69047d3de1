"""The private parts of torch that this project uses, each with the reason why nothing public serves.

No other module of `parallel` uses them. tests/unit/parallel/test_torch_internals.py has a test for each, which fails if
a new torch behaves differently. What every operation calls is torch's own object under a public name: a wrapper
function would add a call to every operation.
"""

import importlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

DIVISION_OPTION = "eager_numerics.division_rounding"  # of inductor; torch 2.11 may not have it

# The dispatch modes that see operations of this thread, the innermost one last. An observer joins a mode that is active
# already, since each further mode costs more than a fake operation.
active_dispatch_modes = _get_current_dispatch_mode_stack

# A context in which real tensors are created, also in a dry run: for code that must read values.
real_tensors = unset_fake_temporarily

NAMESPACES = {"aten", "torch_attn"}  # of kernels; the second one is that of attention with variable lengths
FUSED_NORM = "zero::rms_norm"  # and its gradients: one kernel on a GPU (gpt/kernels/norms.py)
NO_KERNELS = {
    "_unsafe_view",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "promote_types",
}
# A dropout takes three kernels on a CPU and one on a GPU: only the one that multiplies is counted.
FUSED_ON_A_GPU = {"bernoulli_", "div_"}


def options_of_exact_division() -> dict[str, Any]:
    """Return options of torch.compile with which quotients in fp32 have the bits of eager ones on a GPU, if it has any.

    Without them inductor's kernels divide by an approximation that is off by up to two units in the last place.
    """
    from torch._inductor import list_options  # here, because it imports torch's compiler

    return {DIVISION_OPTION: True} if DIVISION_OPTION in list_options() else {}


@contextmanager
def activation_memory_budget(share: float) -> Iterator[None]:
    """Let a graph that is compiled in this block save at most a share of what it would for backward, beyond its inputs.

    torch.compile reads it when it cuts a graph into forward and backward, and takes no such option. Operations of this
    project count by their FLOPs: torch would compute them again as if they took no time.
    """
    from torch._functorch import config  # here, because it imports a part of torch's compiler

    chosen = {"activation_memory_budget": share, "is_non_builtin_to_include": True}
    before = {name: getattr(config, name) for name in chosen if hasattr(config, name)}
    try:
        for name in before:
            setattr(config, name, chosen[name])
        yield
    finally:
        for name, value in before.items():  # `config.patch` takes 15 times as long
            setattr(config, name, value)


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


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of the collectives of a group, which has no public attribute for it."""
    return group._get_backend(group._device_types[0]).options._timeout


def take_default_timeout(group: dist.ProcessGroup | None) -> timedelta:
    """Give the collectives of a group that are launched from now on the time limit of the default group, and return it.

    A mesh passes no time limit to its groups, which get torch's constant, and no public function changes it. Messages
    over gloo keep the one that their group was made with, unless their `wait` is given another; 0 is none of its own.
    """
    default = dist.distributed_c10d._get_default_group()
    if dist.get_backend(group) == "fake":
        return timedelta(0)
    timeout = time_limit(default)
    if group not in (None, default):
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return timeout


def flight_record() -> bytes | None:
    """Return torch's record of the last collectives of NCCL, for its analyzer `torchfrtrace`; None without NCCL.

    Torch itself writes it only if NCCL's own time limit has passed, or if a pipe asks for it.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return dump() if dump and torch.cuda.is_initialized() else None


@contextmanager
def step_hooks_run_once(optimizer: Optimizer) -> Iterator[None]:
    """Run an optimizer's step hooks around this context, and at no step inside it, nor those of all optimizers.

    Torch runs them at each call of `step`, and has no public way to call it without them. A schedule of learning rates
    of this optimizer finds that it has stepped, also if `step` is not called inside.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in list(before.values()):
        hook(optimizer, (), {})
    all_hooks = before, after, _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    taken: list[tuple[Any, dict[int, Any]]] = [(hooks, dict(hooks)) for hooks in all_hooks]
    try:
        for hooks, _ in taken:
            hooks.clear()
        yield
    finally:
        for hooks, own in taken:
            hooks.update(own)
    for hook in list(after.values()):
        hook(optimizer, (), {})


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
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # torch 2.11 has neither this nor the option
    options = read() if read else ""
    found = re.search(r"pinned_max_round_threshold_mb:(\d+)", options.replace(" ", ""))
    return int(found[1]) * 2**20 if found else math.inf


def set_compile_threads(number: int) -> None:
    """Set the number of processes in which inductor compiles, if it has read the environment already."""
    if (config := sys.modules.get("torch._inductor.config")) is not None:
        config.compile_threads = number  # type: ignore[attr-defined]


def memory_snapshot(path: Path) -> None:
    """Write a snapshot of the CUDA allocator's memory, which https://pytorch.org/memory_viz displays."""
    torch.cuda.memory._dump_snapshot(str(path))


def multiplies_in_bf16(device: torch.device) -> bool:
    """Return True if a device has fast products in bf16; without oneDNN's, a CPU takes 40 times as long as in fp32.

    The public functions of `torch.cpu` name instructions, and not those that oneDNN needs.
    """
    has_products = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type != "cpu" or has_products


def schema_of(operation: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an operation: which arguments it writes to, and which results alias an argument.

    An operation has no public attribute that says so.
    """
    return operation._schema


def returns_views(operation: OpOverload) -> bool:
    """Return True if all results of an operation are views of its arguments, by its schema."""
    aliases = [result.alias_info for result in schema_of(operation).returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def runs_a_kernel(operation: OpOverload, args: Sequence[Any]) -> bool:
    """Return True if a GPU runs a kernel for the operation with these arguments."""
    if operation is torch.ops.aten.copy_.default and are_the_same_elements(*args[:2]):
        return False  # torch returns early
    return _has_a_kernel(operation)


@cache
def _has_a_kernel(operation: OpOverload) -> bool:
    is_kernel = operation.namespace in NAMESPACES or schema_of(operation).name.startswith(FUSED_NORM)
    is_counted = is_kernel and not returns_views(operation)
    return is_counted and schema_of(operation).name.removeprefix("aten::") not in NO_KERNELS | FUSED_ON_A_GPU


def are_the_same_elements(one: Tensor, other: Tensor) -> bool:
    """Return True if both are the same view of the same memory."""
    return (
        storage_id(one.untyped_storage()) == storage_id(other.untyped_storage())
        and one.storage_offset() == other.storage_offset()
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    )


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that all Python objects of one storage share, unique as long as the storage exists.

    `id` differs between Python objects, and fake storages have no `data_ptr`.
    """
    return storage._cdata


def active_observers() -> list[Any]:
    """Return the observers of this thread's operations, the innermost one last: those in the lists of its modes."""
    return [observer for mode in active_dispatch_modes() for observer in getattr(mode, "observers", ())]


class UnguardedDispatchMode(TorchDispatchMode):
    """A dispatch mode without Dynamo's guard, which doubles the time of an operation.

    No code is compiled while one is active.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # read when a subclass is created: True would wrap its __torch_dispatch__ in the guard


def load_compiler() -> None:
    """Import what `torch.compiler.disable` needs.

    Called when a module is imported: an import of it keeps the frames of all callers, and what they refer to, until
    Python's collector of cycles runs.
    """
    importlib.import_module("torch._dynamo")
