"""Floating-point operations of training, by formula, in two conventions that differ by a factor of up to 1.4.

Both count matrix products only, a multiply-add as two operations, and backward as twice forward. With s = seq_length,
h = hidden_size, L = num_layers, V = vocab_size, a = num_heads x head_dim, which is h in GPT-2, and W weights in the
linear layers of a block, forward costs for each token

    blocks       2 L W      GPT-2: 24 L h^2, of it qkv 6, projection 2, up 8, down 8
    attention    4 L s a    q k^T and weights v over all s positions; a causal model needs half of it, 2 L s a
    head         2 h V

*Model FLOPs* are what learning needs: 3 times forward with causal attention, whatever the implementation computes. This
is Megatron-LM's present formula, for GPT-2 72 B s L h^2 (1 + s/12h + V/12Lh). Attention counts half: the other half of
the scores is masked. MFU measures how well the hardware is used, so an implementation that skips the masked half, such
as flash attention, must not get a lower MFU for it.

*Hardware FLOPs* are what is executed: all of attention if the kernel is `math`, the head with its padding, and what
backward computes again. That is the forward of the blocks if activations are checkpointed, or the inside of attention
if only that is recomputed (`math`: the scores only, because backward does not need weights v; `flash`: the causal half
of both). Flash attention computes the scores a second time in backward, which is not counted.
"""

import torch

from gpt.shape.config import ModelConfig
from parallel.tensor.blocks import Recomputation

# Dense tensor-core rates from NVIDIA's data sheets; the first name that a device's name contains applies.
PEAK_FLOPS_PER_SECOND = (
    ("V100", {torch.float16: 125e12}),
    ("A100", {torch.float16: 312e12, torch.bfloat16: 312e12}),
    ("H100 PCIe", {torch.float16: 756e12, torch.bfloat16: 756e12}),
    ("H100 NVL", {torch.float16: 835e12, torch.bfloat16: 835e12}),
    ("H100", {torch.float16: 989e12, torch.bfloat16: 989e12}),
    ("H200 NVL", {torch.float16: 835e12, torch.bfloat16: 835e12}),
    ("H200", {torch.float16: 989e12, torch.bfloat16: 989e12}),
)


def model_flops(config: ModelConfig, num_sequences: int) -> int:
    """Return the model FLOPs of forward and backward over sequences of full length."""
    return (
        3
        * (_blocks_forward(config, is_causal=True) + _head_forward(config, config.vocab_size))
        * num_sequences
        * config.seq_length
    )


def hardware_flops(config: ModelConfig, num_sequences: int, recomputes: Recomputation) -> int:
    """Return the hardware FLOPs of forward and backward over sequences of full length."""
    blocks = _blocks_forward(config, is_causal=config.attention == "flash")
    recomputed = {
        "nothing": 0,
        "attention": 2 * config.num_layers * config.seq_length * config.num_heads * config.head_size,
        "blocks": blocks,
    }
    return (
        (3 * blocks + recomputed[recomputes] + 3 * _head_forward(config, config.padded_vocab_size))
        * num_sequences
        * config.seq_length
    )


def peak_flops_per_second(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak rate of one device, or None if it is not known, as for a CPU or for fp32."""
    for name, peaks in PEAK_FLOPS_PER_SECOND:
        if name in device_name:
            return peaks.get(dtype)
    return None


def _blocks_forward(config: ModelConfig, is_causal: bool) -> int:
    """Return the FLOPs of the forward of all blocks for one token."""
    attention = (2 if is_causal else 4) * config.seq_length * config.num_heads * config.head_size
    return config.num_layers * (2 * config.block_weights + attention)


def _head_forward(config: ModelConfig, vocab_size: int) -> int:
    """Return the FLOPs of the forward of the head for one token."""
    return 2 * config.hidden_size * vocab_size
