"""Hashes of tensors, which differ if a single bit does."""

import torch
from torch import Tensor

from zero.core.protocols.extension import Extension

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers, as a 0-dim int64 tensor. Its order does not matter."""
    words = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
    if words.data_ptr() % 8 == 0 and words.nbytes % 8 == 0:
        words = words.view(torch.int64)  # a sum without a cast, which is several times faster on a CPU
    return words.sum(dtype=torch.int64)


class GradientHashes(Extension):
    """Hashes of the gradients of some backwards, as they arrive from autograd: neither added to others nor sent.

    If it `discards` them, a step's gradients are those of its other backwards.
    """

    def __init__(self, device: torch.device, *, discards: bool = False):
        self._device, self._discards = device, discards
        self._of_backwards: list[Tensor] = []

    def on_backward(self) -> bool:
        """Begin the hash of another backward."""
        self._of_backwards.append(torch.zeros((), dtype=torch.int64, device=self._device))
        return not self._discards

    def on_gradient(self, number: int, grad: Tensor) -> None:
        """Add the gradient of parameter `number`, by a factor of its own: an odd one, which loses no bit."""
        self._of_backwards[-1] += (2 * number + 1) * bit_sum(grad)

    def __getitem__(self, backward: int) -> Tensor:
        """Return the hash of a backward: 0-dim, int64, on the device of the gradients."""
        return self._of_backwards[backward]
