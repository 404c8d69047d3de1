"""A small GPT in float64 and a batch for it."""

import torch
from torch import Tensor

from gpt.model.config import ModelConfig
from gpt.model.transformer import GPT, initialize
from parallel.blocks import RunBlocks
from parallel.mesh import Axis
from parallel.tensor.token_layout import ReplicatedTokens

ONE_DEVICE = ReplicatedTokens(Axis.trivial("tensor"))


def small_config(**changes: object) -> ModelConfig:
    settings = {"num_layers": 5, "hidden_size": 24, "num_heads": 3, "seq_length": 16, "vocab_size": 61, "dropout": 0.0}
    return ModelConfig(**{**settings, **changes})


def small_gpt(config: ModelConfig, run_blocks: RunBlocks | None = None, seed: int = 1) -> GPT:
    model = GPT(config, ONE_DEVICE, run_blocks).double()
    initialize(model, seed)
    return model


def batch(config: ModelConfig, num_sequences: int = 2) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, (batch, seq) each."""
    tokens = torch.randint(config.vocab_size, (num_sequences, config.seq_length + 1))
    return tokens[:, :-1], tokens[:, 1:]
