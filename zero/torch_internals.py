"""The private parts of torch that `zero` rests on, each with its reason; tests fail if torch changes one of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

NO_GRAPH_TASK = -1

# Norms of many tensors in one call. `torch.nn.utils` calls the same function, but does not take the dtype of the sums.
foreach_norm = torch._foreach_norm


def current_graph_task() -> int:
    """Return autograd's number of the running backward, or `NO_GRAPH_TASK`.

    No public function distinguishes one backward from the next. State that was recorded with this number is out of date
    once that backward has ended or raised.
    """
    return torch._C._current_graph_task_id()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once when the running backward has ended. Call this inside a backward only.

    Hooks on tensors and parameters cannot know that no other gradient follows; DistributedDataParallel uses the same
    queue.
    """
    Variable._execution_engine.queue_callback(callback)


def forbid_writes(tensor: Tensor) -> None:
    """Make every write to the tensor's storage raise RuntimeError.

    Torch refuses most writes to an expanded tensor, since its elements share memory, but not `fill_`, `zero_` and
    writes to a single element: these would be lost in silence.
    """
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def replace_parameter_table(module: nn.Module, make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the dictionary in which a module keeps its own parameters by `make(dictionary)`.

    A read of `module.weight` is a lookup in this dictionary, and torch has no hook for it.
    """
    module._parameters = make(module._parameters)
