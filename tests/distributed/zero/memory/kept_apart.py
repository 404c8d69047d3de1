"""A check that an operation on a CPU treats accelerator and host memory as two memories, as a GPU does."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.observe.fake_tensors import instances_in
from lab.observe.memory_tracker import MemoryTracker


class KeptApart(TorchDispatchMode):
    """A dispatch mode that fails if one operation reads or writes both memories, as it would on a GPU.

    Only copies may use both. Collectives may use the memory of the accelerator only, as NCCL's do.
    """

    def __init__(self, tracker: MemoryTracker):
        super().__init__()
        self.tracker, self.num_copies = tracker, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [*instances_in((args, tuple((kwargs or {}).values())), Tensor)]
        places = {self.tracker.is_on_host(tensor) for tensor in tensors if tensor.dim()}
        assert function.namespace != "c10d" or True not in places, f"{function} reads host memory"
        if len(places) == 2:
            assert function is torch.ops.aten.copy_.default, f"{function} reads both memories"
            self.num_copies += 1
        return function(*args, **(kwargs or {}))
