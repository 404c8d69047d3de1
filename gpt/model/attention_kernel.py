"""The attention kernel that torch chooses on a GPU, for the log."""

import torch

from gpt.model.config import ModelConfig
from gpt.model.documents import needs_mask
from parallel.torch_internals import attention_backend

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
