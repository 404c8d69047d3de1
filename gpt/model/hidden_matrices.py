"""The parameters of a GPT that Muon updates, and that muP scales: the matrices inside of the blocks."""

from torch import nn


def is_hidden_matrix(name: str, param: nn.Parameter) -> bool:
    """Return whether a parameter of a GPT is a matrix between hidden layers: not an embedding, the head or a vector."""
    return name.startswith("blocks.") and param.dim() == 2
