"""The interface between a model and the function that runs its blocks, in order or under activation checkpoints.

A model calls a `RunBlocks` with its blocks and their input, and gets their output. Neither side imports the other.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

RunBlock = Callable[[Tensor], Tensor]
RunBlocks = Callable[[Sequence[RunBlock], Tensor], Tensor]
Recomputation = Literal["nothing", "attention", "blocks"]  # what is computed again in backward


def run_in_order(blocks: Sequence[RunBlock], x: Tensor) -> Tensor:
    """Return the output of the last block; each block's input is the output of the one before it."""
    for block in blocks:
        x = block(x)
    return x
