"""Small models in float64, with the parts of every preset, and a batch for them."""

import torch
from torch import Tensor

from gpt.formats.config_files import read_section
from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig, RopeScaling
from parallel.mesh import Axis
from parallel.tensor.blocks import RunBlocks
from parallel.tensor.token_layout import ReplicatedTokens
from tests.source_files import ROOT

MODELS = ROOT / "configs" / "models"
SIZES = {  # of small models with the parts of a preset, whose own sizes are those of large models
    "gpt2": {},
    "llama": {"num_kv_heads": 2, "mlp_width": 40, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8)},
    "llama2": {"mlp_width": 40},
    "qwen2": {"num_kv_heads": 2, "mlp_width": 40},
    "qwen3": {"num_kv_heads": 2, "mlp_width": 40, "head_dim": 12},
    "mistral": {"num_kv_heads": 1, "mlp_width": 40},
}
FILES = {"llama2": "llama"}
ONE_DEVICE = ReplicatedTokens(Axis.trivial("tensor"))


def small_config(**changes: object) -> ModelConfig:
    settings = {"num_layers": 5, "hidden_size": 24, "num_heads": 3, "seq_length": 16, "vocab_size": 61, "dropout": 0.0}
    return ModelConfig(**{**settings, **changes})


def preset_config(name: str, **changes: object) -> ModelConfig:
    """Return a small model of 4 heads with the parts of a preset."""
    path = MODELS / f"{FILES.get(name, name)}.yaml"
    parts = read_section(path, path.name)["model"]
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 12, "vocab_size": 97, "dropout": 0.0}
    return ModelConfig(**{**sizes, **parts, **SIZES[name], **changes})


OPTIONS = {  # of GPT-2, one at a time
    "rope": {"positions": "rope"},
    "rms": {"norm": "rms"},
    "relu2": {"mlp": "relu2"},
    "swiglu": {"mlp": "swiglu", "mlp_width": 24},
    "grouped": {"num_kv_heads": 2},
    "one-kv-head": {"num_kv_heads": 1, "attention": "math"},
    "head-dim": {"head_dim": 6},
    "qk-norm": {"qk_norm": True},
    "no-biases": {"biases": False},
    "untied": {"tied_head": False},
    "capped": {"logit_cap": 0.5},
    "mup": {"num_kv_heads": 2, "tied_head": False, "mup_base_width": 8, "mup_base_head_dim": 4},
}
VARIANTS = {
    **{name: preset_config(name) for name in SIZES if name != "gpt2"},
    **{name: preset_config("gpt2", **changes) for name, changes in OPTIONS.items()},
}


def small_gpt(config: ModelConfig, run_blocks: RunBlocks | None = None, seed: int = 1) -> GPT:
    model = GPT(config, ONE_DEVICE, run_blocks).double()
    initialize(model, seed)
    return model


def batch(config: ModelConfig, num_sequences: int = 2) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, (batch, seq) each."""
    tokens = torch.randint(config.vocab_size, (num_sequences, config.seq_length + 1))
    return tokens[:, :-1], tokens[:, 1:]
