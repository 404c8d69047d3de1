"""Rotary positions (RoPE): pairs of elements of queries and keys are rotated by angles proportional to the position.

Element i of a head's first half and element i of its second half are a pair, as in transformers, whose bits the tables
have: they are computed in fp32 whatever the dtype of the model is.
"""

import math

import torch
from torch import Tensor

from gpt.shape.config import ModelConfig, RopeScaling

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (..., seq, head_dim) each


def rotated(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Return heads (batch, heads, seq, head_dim) rotated by the angles of their positions, if there are any."""
    if rotation is None:
        return x
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cosines, torch.cat((-second, first), dim=-1), sines)


def tables(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Rotation:
    """Return the cosines and sines of all positions, (seq_length, head_dim) each."""
    exponents = torch.arange(0, config.head_size, 2, device=device).float() / config.head_size
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = scaled(frequencies, config.rope_scaling)
    angles = torch.arange(config.seq_length, device=device).float()[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the frequencies as Llama 3.1 scales them: low ones divided by the factor, high ones unchanged."""
    turns = scaling.original_seq_length / (2 * math.pi / frequencies)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)
    return (1 - share) * frequencies / scaling.factor + share * frequencies
