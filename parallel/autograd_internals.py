"""The private parts of torch that `zero` rests on, each with its reason; tests fail if torch changes one of them."""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from itertools import chain
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.utils.hooks import RemovableHandle

P = ParamSpec("P")
R = TypeVar("R")
NO_GRAPH_TASK = -1

# A `__torch_function__` runs what it was called for inside this context, or it would be called again.
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass

# Norms of many tensors in one call. `torch.nn.utils` calls the same function, but does not take the dtype of the sums.
foreach_norm = torch._foreach_norm

# Operations on many tensors in one kernel, which torch's own optimizers use.
foreach_mul_, foreach_copy_ = torch._foreach_mul_, torch._foreach_copy_


def current_graph_task() -> int:
    """Return autograd's number of the running backward, or `NO_GRAPH_TASK`.

    No public function distinguishes one backward from the next. State that was recorded with this number is out of date
    once that backward has ended or raised.
    """
    return torch._C._current_graph_task_id()


def is_nested_backward() -> bool:
    """Return whether the running backward was started inside another one, as a reentrant checkpoint does.

    Autograd numbers both, and says of neither that it contains the other. The frames of this thread do: outside the
    call that runs this backward there is another such call, or the node that made it. On an accelerator the nodes run
    in a thread of autograd's own, in which a call that runs a backward is always inside another one. Python knows such
    a thread, which it did not start, as a dummy.
    """
    num_runs = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            num_runs += 1
        if num_runs == 2 or (num_runs and frame.f_code is BackwardCFunction.apply.__code__):
            return True
        frame = frame.f_back
    return num_runs == 1 and isinstance(threading.current_thread(), threading._DummyThread)


def will_accumulate(param: nn.Parameter) -> bool:
    """Return whether the running backward reaches the node that accumulates a parameter's gradient.

    `torch.autograd.grad` returns gradients and accumulates none; autograd raises if it is asked about its inputs, and
    in transforms of `torch.func` a parameter has no node. The node is not kept: the garbage collector does not see that
    it refers to the parameter.
    """
    with DisableTorchFunction():
        try:
            return param.requires_grad and torch._C._will_engine_execute_node(get_gradient_edge(param).node)
        except (RuntimeError, AttributeError):
            return False


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once when the running backward has ended. Call this inside a backward only.

    Hooks on tensors and parameters cannot know that no other gradient follows; DistributedDataParallel uses the same
    queue.
    """
    Variable._execution_engine.queue_callback(callback)


def never_begin_graph(function: Callable[..., Any]) -> None:
    """Have torch.compile trace a function inside others only, and never compile it by itself.

    `torch.compiler.disable` also ends the graph of a function that calls it.
    """
    from torch._dynamo.eval_frame import skip_code  # here: the compiler is large, and slow to import

    skip_code(function.__code__)


def forbid_writes(tensor: Tensor) -> None:
    """Make every write to the tensor's storage raise RuntimeError.

    Torch refuses most writes to an expanded tensor, since its elements share memory, but not `fill_`, `zero_` and
    writes to a single element: these would be lost in silence. Under torch's CUDA sanitizer, which reads the addresses
    of all tensors, nothing is forbidden.
    """
    sanitizer = sys.modules.get("torch.cuda._sanitizer")
    if sanitizer is not None and sanitizer.cuda_sanitizer.enabled:
        return
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def has_saved_tensors_hooks() -> bool:
    """Return whether `saved_tensors_hooks` are active in this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def outside_of_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that the transforms of `torch.func`, inside which it may be called, do not see it.

    They refuse writes to tensors that were made outside of them.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return run


def run_first(module: nn.Module, handle: RemovableHandle) -> None:
    """Make a forward pre-hook the first one of its module: a hook that was put before it runs after it.

    Raises RuntimeError if the module no longer has it.
    """
    if handle.id not in module._forward_pre_hooks:
        raise RuntimeError(
            f"a {type(module).__name__} inside ZeroDataParallel has lost the hooks that gather its parameters; remove "
            "hooks by the handle that registering them has returned"
        )
    if next(iter(module._forward_pre_hooks)) != handle.id:
        module._forward_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


def run_last(module: nn.Module, handle: RemovableHandle) -> None:
    """Make a forward hook the last one of its module: a hook that was registered after it runs before it."""
    if handle.id in module._forward_hooks and next(reversed(module._forward_hooks)) != handle.id:
        module._forward_hooks.move_to_end(handle.id)  # type: ignore[attr-defined]


def name_hook(handle: RemovableHandle, name: str) -> None:
    """Have a module keep a hook under a name, and not under a number; it becomes the last of the module's hooks.

    torch.compile checks the numbers of some hooks before it calls compiled code, and would compile each module again.
    """
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        table = reference()
        if handle.id in table:
            table[name] = table.pop(handle.id)
    handle.id = name  # type: ignore[assignment]


def structure_of(module: nn.Module) -> Callable[[], list[int]]:
    """Return a function that returns the `id` of each submodule and parameter that the module has now.

    It looks at the tables of the modules that the module has when this is called: to walk over all modules and names,
    as `named_parameters` does, takes ten times as long.
    """
    tables = [table for part in module.modules() for table in (part._modules, part._parameters)]
    return lambda: list(map(id, chain.from_iterable(map(dict.values, tables))))  # type: ignore[arg-type]


def replace_parameter_table(module: nn.Module, make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the dictionary in which a module keeps its own parameters by `make(dictionary)`.

    A read of `module.weight` is a lookup in this dictionary, and torch has no hook for it.
    """
    module._parameters = make(module._parameters)


def restore_parameter_tables(root: nn.Module) -> None:
    """Replace the tables of parameters of `root` and its submodules by plain dictionaries with the same content."""
    for module in root.modules():
        replace_parameter_table(module, dict)
