"""Memory that is freed and allocated again: storages, and the pool that transient full gradients pass through (C_B)."""

from collections import defaultdict, deque
from collections.abc import Mapping

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind
from parallel.mesh import Handle
from zero.memory.placement import Offload, Placement


def free_storage(tensor: Tensor) -> None:
    """Free the memory of a tensor that fills its storage; it and its views have no values until `restore_storage`."""
    tensor.untyped_storage().resize_(0)


def restore_storage(tensor: Tensor) -> None:
    """Allocate the memory again that `free_storage` freed, not initialized; do nothing if it was not freed."""
    if not tensor.untyped_storage().nbytes():
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


class StagingPool:
    """Blocks of memory, each large enough for any bucket of its dtype: one fills while others are reduced.

    `num_blocks` of each dtype are allocated at once, before activations fragment the memory; more are added if
    gradients arrive in another order than that of the layout.
    """

    def __init__(self, block_numel: int, num_blocks: Mapping[torch.dtype, int], offload: Offload):
        self._block_numel, self._offload = block_numel, offload
        self._free: defaultdict[torch.dtype, deque[tuple[Tensor, Handle]]] = defaultdict(deque)
        self.num_bytes = 0  # when all blocks are in use
        for dtype, number in num_blocks.items():
            self._free[dtype].extend((self._new_block(dtype), Handle()) for _ in range(number))

    def take(self, dtype: torch.dtype) -> Tensor:
        """Return a block, not initialized."""
        if not self._free[dtype]:
            return self._new_block(dtype)
        block, last_read = self._free[dtype].popleft()
        last_read.wait()
        restore_storage(block)
        return block

    def put_back(self, block: Tensor, last_read: Handle) -> None:
        """Return a block to the pool; `last_read` is waited for before the block is written or freed."""
        self._free[block.dtype].append((block, last_read))

    def free(self) -> None:
        """Free the memory of all blocks until they are taken again."""
        for blocks in self._free.values():
            for block, last_read in blocks:
                last_read.wait()
                free_storage(block)

    def _new_block(self, dtype: torch.dtype) -> Tensor:
        self.num_bytes += self._block_numel * dtype.itemsize
        return self._offload.new(Placement.ACCELERATOR, TensorKind.BUFFERS, self._block_numel, dtype)
