"""Documents that share a sequence and are kept apart: attention stays inside each, and positions restart.

    positions   0 1 2 3 | 0 1 | 0 1 2         starts   0 4 6 9        of a sequence of three documents

On a GPU that supports it, attention runs by torch's kernel of variable lengths, whose work is that of the documents one
by one. Elsewhere the scores between documents are masked: the work is that of whole sequences, and the mask takes
seq_length^2 elements a sequence, once for all layers.
"""

from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.mesh import HALF_TYPES
from parallel.torch_internals import FakeTensor

MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8  # of torch's kernel of variable lengths, which has no dropout
FIRST_CAPABILITY = 8, 0


class Documents(NamedTuple):
    """The stretches of documents in the sequences of a micro-batch.

    `positions`, int64 (batch, seq), begin at 0 in each. `starts`, int32 (stretches + 1,), are the first token of each
    among those of all sequences, and their number; none if there is a mask, which alone is read then.
    """

    positions: Tensor
    starts: Tensor
    mask: Tensor | None = None  # (batch, 1, seq, seq), added to the scores; None for the kernel of variable lengths

    def with_mask(self, dtype: torch.dtype) -> Self:
        """Return the documents with the mask that attention in `dtype` adds to its scores."""
        seq_length = self.positions.shape[1]
        first = torch.arange(seq_length, device=self.positions.device) - self.positions  # of each token's stretch
        # Two tokens are in the same stretch if it begins at the same token.
        is_seen = (first[:, :, None] == first[:, None, :]).tril_()[:, None]
        mask = torch.zeros_like(is_seen, dtype=dtype).masked_fill_(is_seen.logical_not_(), -torch.inf)
        return self._replace(mask=mask, starts=self.starts[:0])  # of one shape, whatever the number of stretches

    def attention(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float | None = None) -> Tensor:
        """Return causal attention inside each document of (batch, heads, seq, head_dim) tensors."""
        options: dict[str, Any] = {} if scale is None else {"scale": scale}
        grouped = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
        if self.mask is not None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, dropout_p=dropout, **grouped, **options)
        # Imported here: it registers operators, which takes time, and older versions of torch do not have it.
        from torch.nn.attention.varlen import varlen_attn

        if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):  # torch 2.11 groups heads untold
            options |= grouped
        num_sequences, _, seq_length, _ = q.shape
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))  # (tokens, heads, head_dim), no copies
        starts, longest = self.starts, seq_length  # no stretch is longer than a sequence
        # A window without tokens to the right is causal attention.
        attended = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **options)
        assert isinstance(attended, Tensor)
        return attended.unflatten(0, (num_sequences, -1)).transpose(1, 2)


def needs_mask(attention: str, head_dim: int, dropout: float, x: Tensor) -> bool:
    """Return True if attention of documents in a residual stream like `x` cannot run by the kernel of variable lengths.

    Of a fake tensor, the device is taken for a GPU that has the kernel.
    """
    has_kernel = isinstance(x, FakeTensor) or device_has_kernel(x.device)
    return not (has_kernel and suits_kernel(attention, head_dim, dropout, x.dtype))


def suits_kernel(attention: str, head_dim: int, dropout: float, dtype: torch.dtype) -> bool:
    """Return True if the kernel of variable lengths computes such attention, on a device that has it."""
    return (
        attention == "flash"
        and not dropout
        and head_dim <= MAX_HEAD_DIM
        and head_dim % HEAD_DIM_MULTIPLE == 0
        and dtype in HALF_TYPES
    )


@cache
def device_has_kernel(device: torch.device) -> bool:
    """Return True if torch has the kernel of variable lengths for the device: for A100 and later GPUs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
