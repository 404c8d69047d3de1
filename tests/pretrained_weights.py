"""Whole state dicts between this project and transformers; the product converts tensor by tensor."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from gpt.checkpoint.pretrained import WeightsWriter
from gpt.model.huggingface import (
    name_from_huggingface,
    name_to_huggingface,
    tensor_from_huggingface,
    tensor_to_huggingface,
)
from gpt.model.transformer import ModelConfig


def weights_from_huggingface(weights: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """Return our state dict, made from that of a GPT2LMHeadModel or a GPT2Model."""
    names = {name: name_from_huggingface(name) for name in weights}
    return {ours: tensor_from_huggingface(ours, weights[name], num_heads) for name, ours in names.items() if ours}


def weights_to_huggingface(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the state dict of a GPT2LMHeadModel without its tied head, made from ours."""
    return {name_to_huggingface(name): tensor_to_huggingface(name, t, config) for name, t in weights.items()}


def write_pretrained(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a folder that transformers opens, made from our configuration and state dict."""
    writer = WeightsWriter(folder, config)
    for name, tensor in weights.items():
        writer.add(name, tensor)
    writer.finish()
