"""Memory that is freed and allocated again: storages, and pools of a few buffers (C_B)."""

import warnings
from collections import defaultdict, deque
from collections.abc import Iterable

import torch
from torch import Tensor

from parallel.mesh import Work
from zero.core.memory.allocators import Allocate


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


class BufferPool:
    """Buffers of each dtype: one is filled while others are still read.

    Those of `dtypes` are allocated at once, before activations fragment the memory; more are added when they are
    needed. A buffer is taken again when `num_in_turn` are free, and has at least `least_numel` elements.
    """

    def __init__(
        self, allocate: Allocate, least_numel: int = 0, dtypes: Iterable[torch.dtype] = (), num_in_turn: int = 1
    ):
        self._allocate, self._num_in_turn = allocate, num_in_turn
        self._free: defaultdict[torch.dtype, deque[tuple[Tensor, Work]]] = defaultdict(deque)
        self.num_bytes = 0
        """The bytes of all buffers, also of those that are taken, as if none of them was freed."""
        self.reserve(least_numel, dtypes)

    def reserve(self, least_numel: int, dtypes: Iterable[torch.dtype]) -> None:
        """Let new buffers have at least this many elements, and allocate one for each of `dtypes`."""
        self._least_numel = least_numel
        for dtype in dtypes:
            self.put_back(self._new_buffer(dtype, least_numel), Work())

    def take(self, dtype: torch.dtype, numel: int = 0) -> Tensor:
        """Return a buffer, not initialized, of at least `numel` elements; wait for the last use of an earlier one."""
        if len(self._free[dtype]) >= self._num_in_turn:
            buffer, last_use = self._free[dtype].popleft()
            last_use.wait()
            if buffer.numel() >= numel:
                restore_storage(buffer)
                return buffer
            self.num_bytes -= buffer.nbytes
        return self._new_buffer(dtype, max(numel, self._least_numel))

    def put_back(self, buffer: Tensor, last_use: Work) -> None:
        """Return a buffer to the pool; `last_use` is waited for before the buffer is taken again or freed."""
        self._free[buffer.dtype].append((buffer, last_use))

    def free(self) -> None:
        """Free the memory of all buffers until they are taken again."""
        for buffers in self._free.values():
            for buffer, last_use in buffers:
                last_use.wait()
                free_storage(buffer)

    def _new_buffer(self, dtype: torch.dtype, numel: int) -> Tensor:
        buffer = self._allocate(numel, dtype)
        self.num_bytes += buffer.nbytes
        return buffer
