"""The kernels of causal attention, and which one computes it on a device.

A kernel is called with (q, k, v, dropout, documents), q being (batch, heads, seq, head_dim), and k and v having as many
heads or fewer; it returns a tensor like q.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.kernels.documents import Documents, needs_mask
from gpt.shape.config import ModelConfig
from parallel.torch_internals import attention_backend


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Documents | None = None, scale: float | None = None
) -> Tensor:
    """Return causal attention of (batch, heads, seq, head_dim) tensors by torch's fused kernel."""
    if documents is not None:
        return documents.attention(q, k, v, dropout, scale)
    is_grouped = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=is_grouped
    )


def math_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Documents | None = None, scale: float | None = None
) -> Tensor:
    """Return causal attention of (batch, heads, seq, head_dim) tensors by explicit matrices of scores.

    The heads of a group that share keys and values are computed as one longer sequence of queries.
    """
    heads, seq_length = (k.shape[1], q.shape[1] // k.shape[1]), q.shape[2]
    q = (
        (q * (q.shape[-1] ** -0.5 if scale is None else scale)).unflatten(1, heads).flatten(2, 3)
    )  # (batch, groups, heads of a group x seq, head_dim)
    scores = q @ k.transpose(-2, -1)
    if documents is not None and documents.mask is not None:
        scores += documents.mask.expand(-1, heads[1], -1, -1).flatten(1, 2)[:, None]
    else:
        is_future = torch.ones((seq_length, seq_length), dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(is_future.expand(heads[1], -1, -1).flatten(0, 1), -math.inf)
    return (F.dropout(scores.softmax(dim=-1), dropout) @ v).unflatten(2, (heads[1], -1)).flatten(1, 2)


Kernel = Callable[[Tensor, Tensor, Tensor, float, Documents | None], Tensor]
ATTENTION_KERNELS: dict[str, Callable[..., Tensor]] = {"flash": flash_attention, "math": math_attention}

NAMES = {
    "FLASH_ATTENTION": "FlashAttention",
    "CUDNN_ATTENTION": "cuDNN",
    "EFFICIENT_ATTENTION": "memory-efficient attention, which is slower than FlashAttention",
    "MATH": "the math kernel, which stores every score: no fused one takes this head size, dropout and precision",
}


def describe_documents(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return which kernel keeps documents apart in training."""
    if not needs_mask(config.attention, config.head_size, config.dropout, torch.empty(0, device=device, dtype=dtype)):
        return "torch.nn.attention.varlen"
    return f"a mask of {config.seq_length} x {config.seq_length} scores a sequence"


def describe_attention(config: ModelConfig, tensor_size: int, device: torch.device, dtype: torch.dtype) -> str:
    """Return which kernel computes attention, in training, on each of `tensor_size` ranks."""
    if config.attention == "math":
        return "explicit matrices of scores (model.attention=math)"
    num_own_heads, num_own_kv_heads = (max(1, n // tensor_size) for n in (config.num_heads, config.kv_heads))
    shapes = ((1, heads, config.seq_length, config.head_size) for heads in (num_own_heads, num_own_kv_heads))
    query, key = (torch.empty(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    name = attention_backend(query, key, config.dropout).name
    return f"torch.nn.functional.scaled_dot_product_attention by {NAMES.get(name, name)}"
