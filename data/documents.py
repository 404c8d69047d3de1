"""Samples whose documents are kept apart, and batches of them.

Such a sample is an int64 array (3, seq_length) of tokens, targets and positions. Each stretch of a document begins at
position 0. The target of a token is the next one of its document, or NOT_COUNTED if it has none in the sample.

    stream      tokens     a1 a2 a3 | b0 b1 b2          best fit    a0 a1 a2 | b0 b1 | -- --
                targets    a2 a3  - | b1 b2 b3                      a1 a2 a3 | b1 b2 |  -  -
                positions   0  1  2 |  0  1  2                       0  1  2 |  0  1 |  0  1
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

NOT_COUNTED = -(2**40)  # below all tokens that a file can hold, so that a damaged one is not taken for it


@dataclass(frozen=True)
class DocumentBatch:
    """A micro-batch whose documents are kept apart.

    `tokens`, `targets` and `positions` are int64 (micro_batch_size, seq_length). `starts` is int32 (documents + 1,):
    the first token of each stretch of a document among those of all samples, one after the other, and their number.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    starts: Tensor

    @classmethod
    def of(cls, samples: np.ndarray) -> Self:
        """Return the batch of an array (micro_batch_size, 3, seq_length) of samples."""
        tokens, targets, positions = (np.ascontiguousarray(samples[:, row]) for row in range(3))
        starts = np.append(np.flatnonzero(positions == 0), positions.size).astype(np.int32)
        return cls(*map(torch.from_numpy, (tokens, targets, positions, starts)))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the batch after `Tensor.to` of its tensors."""
        return type(self)(*(getattr(self, field.name).to(*args, **kwargs) for field in fields(self)))

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory."""
        return type(self)(*(getattr(self, field.name).pin_memory() for field in fields(self)))


MicroBatch = Tensor | DocumentBatch  # a tensor is int64 (micro_batch_size, seq_length + 1)


def joined_apart(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sample of consecutive pieces of the stream of tokens, which together have seq_length + 1.

    The last token of a document is an input as well, without a target.
    """
    inputs = [*pieces[:-1], pieces[-1][:-1]]
    targets = [np.append(piece[1:], NOT_COUNTED) for piece in pieces[:-1] if len(piece)]
    return _sample(inputs, [*targets, pieces[-1][1:]])


def packed_apart(pieces: Sequence[np.ndarray], seq_length: int) -> np.ndarray:
    """Return the sample of pieces that have n tokens for n - 1 predictions each; the rest of it is padding."""
    num_missing = seq_length - sum(len(piece) - 1 for piece in pieces)
    inputs = [*(piece[:-1] for piece in pieces), np.zeros(num_missing, dtype=np.int64)]
    return _sample(inputs, [*(piece[1:] for piece in pieces), np.full(num_missing, NOT_COUNTED)])


def _sample(inputs: Iterable[np.ndarray], targets: Iterable[np.ndarray]) -> np.ndarray:
    parts = list(inputs)
    positions = np.concatenate([np.arange(len(part)) for part in parts])
    return np.stack([np.concatenate(parts, dtype=np.int64), np.concatenate(list(targets), dtype=np.int64), positions])
