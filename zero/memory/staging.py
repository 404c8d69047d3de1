"""Memory that is freed and allocated again: storages, and the pool that transient full gradients pass through (C_B)."""

import warnings
from collections import defaultdict, deque
from collections.abc import Mapping

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind
from parallel.mesh import Work
from zero.memory.placement import Offload, Placement


def free_storage(tensor: Tensor) -> None:
    """Free the memory of a tensor that fills its storage; it and its views have no values until `restore_storage`.

    Memory that NumPy has viewed stays allocated, with a warning.
    """
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
    else:
        warnings.warn(
            f"{storage.nbytes()} bytes of ZeroDataParallel stay allocated, because NumPy has viewed a parameter in "
            "them; call `param.detach().clone().numpy()`",
            stacklevel=2,
        )


def restore_storage(tensor: Tensor) -> None:
    """Allocate the memory again that `free_storage` freed, not initialized; do nothing if it was not freed."""
    if not tensor.untyped_storage().nbytes():
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


class StagingPool:
    """Buffers, each large enough for any bucket of its dtype: one fills while others are reduced.

    `counts` of each dtype are allocated at once, before activations fragment the memory; more are added if
    gradients arrive in another order than that of the layout.
    """

    def __init__(self, buffer_numel: int, counts: Mapping[torch.dtype, int], offload: Offload):
        self._buffer_numel, self._offload = buffer_numel, offload
        self._free: defaultdict[torch.dtype, deque[tuple[Tensor, Work]]] = defaultdict(deque)
        self.num_bytes = 0  # when all buffers are in use
        for dtype, number in counts.items():
            self._free[dtype].extend((self._new_buffer(dtype), Work()) for _ in range(number))

    def take(self, dtype: torch.dtype) -> Tensor:
        """Return a buffer, not initialized."""
        if not self._free[dtype]:
            return self._new_buffer(dtype)
        buffer, last_read = self._free[dtype].popleft()
        last_read.wait()
        restore_storage(buffer)
        return buffer

    def put_back(self, buffer: Tensor, last_read: Work) -> None:
        """Return a buffer to the pool; `last_read` is waited for before the buffer is written or freed."""
        self._free[buffer.dtype].append((buffer, last_read))

    def free(self) -> None:
        """Free the memory of all buffers until they are taken again."""
        for buffers in self._free.values():
            for buffer, last_read in buffers:
                last_read.wait()
                free_storage(buffer)

    def _new_buffer(self, dtype: torch.dtype) -> Tensor:
        self.num_bytes += self._buffer_numel * dtype.itemsize
        return self._offload.new(Placement.ACCELERATOR, TensorKind.BUFFERS, self._buffer_numel, dtype)
