"""Buffers that messages are received in: allocated once and reused by the messages that follow."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

Allocate = Callable[[Tensor, int], Tensor]  # (like, numel) -> uninitialized (numel,), dtype and device of `like`


def new_buffer(like: Tensor, numel: int) -> Tensor:
    """Return an uninitialized tensor (numel,) of the dtype and device of `like`."""
    return like.new_empty(numel)


class ReceiveBuffers:
    """One buffer per dtype and concurrent message, each as long as the longest message that it has received.

    A new allocation for each message would take as long as sending it, because the kernel has to map new pages.
    `allocate` returns a new buffer; where memory is tracked, it also tags the buffer.
    """

    def __init__(self, allocate: Allocate = new_buffer) -> None:
        self._allocate = allocate
        self._free: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)  # ascending by length

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer (n,) of the dtype of `like`, with n >= like.numel(). Give it back with `put_back`."""
        free = self._free[like.dtype]
        if free and free[-1].numel() >= like.numel():
            return free.pop()
        if free:
            # No free buffer is long enough. The shortest one is freed before the new one is allocated, so that the
            # number of buffers does not grow and the two do not exist at the same time.
            free.pop(0)
        return self._allocate(like, like.numel())

    def put_back(self, buffer: Tensor) -> None:
        """Return a buffer whose message has been read."""
        free = self._free[buffer.dtype]
        free.append(buffer)
        free.sort(key=Tensor.numel)

    def clear(self) -> None:
        """Free the buffers that are not in use; later messages allocate new ones."""
        self._free.clear()

    @property
    def num_bytes(self) -> int:
        """The bytes of the buffers that are not in use. Between two steps this is all of them."""
        return sum(b.numel() * b.element_size() for free in self._free.values() for b in free)
