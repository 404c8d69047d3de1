"""Whole state dicts between this project and transformers; the product converts tensor by tensor."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt.pretrained.configuration import family_of
from gpt.pretrained.tensors import source_of, to_transformers
from gpt.pretrained.weights import write_weights
from gpt.shape.config import ModelConfig, parameter_shapes


def weights_from_transformers(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return our state dict, made from that of a model of transformers with or without its head."""
    family = family_of(config)
    short = {name.removeprefix(family.prefix): tensor for name, tensor in weights.items()}
    sources = {name: source_of(name, family, config) for name, _ in parameter_shapes(config, config.vocab_size)}
    return {name: source.pack([short[theirs] for theirs in source.names]) for name, source in sources.items()}


def weights_to_transformers(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the state dict of a model of transformers without a tied head, made from ours."""
    parts = [to_transformers(name, tensor, family_of(config), config) for name, tensor in weights.items()]
    return {name: tensor for part in parts for name, tensor in part.items()}


def write_pretrained(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a folder that transformers opens, made from our configuration and state dict."""
    write_weights(folder, config, weights.items())


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of config.json."""
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))
