"""Maximal-update parametrization (muP) for Adam: Yang et al., Tensor Programs V, table 8.

With m = hidden_size / mup_base_width, and beside what a model has without muP,

    initial variance    1/m of hidden matrices
    learning rate       1/m of hidden matrices; their weight decay is that of the base width: m times the coefficient,
                        because AdamW multiplies it by the learning rate
    logits              1/m, with a tied head or one of its own
    attention scores    sqrt(mup_base_head_dim) / head_dim, instead of 1 / sqrt(head_dim)

Fan-in is that of whole matrices, so nothing here depends on the tensor axis.
"""

from torch import nn

from gpt.shape.config import ModelConfig


def is_hidden_matrix(name: str, param: nn.Parameter) -> bool:
    """Return whether a parameter of a GPT is a matrix between hidden layers: not an embedding, the head or a vector."""
    return name.startswith("blocks.") and param.dim() == 2


def hidden_factor(name: str, param: nn.Parameter, config: ModelConfig) -> float:
    """Return the factor of a parameter's initial variance and learning rate."""
    return 1 / config.width_multiplier if is_hidden_matrix(name, param) else 1.0
