"""The parameters of one tensor rank, and the bytes of their optimizer states, without building the model."""

import math
import re
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from gpt.model.mup import is_hidden_matrix
from gpt.model.transformer import GPT
from gpt.settings.optimizer import OptimizerSettings
from gpt.shape.config import ModelConfig, parameter_shapes
from parallel.comm_log import CommLog
from parallel.mesh import Axis
from parallel.tensor.layers import packed_rows, split_dims
from parallel.tensor.token_layout import ReplicatedTokens
from zero.optimizers.adamw8bit import BLOCK
from zero.optimizers.matrices import matrices_of
from zero.optimizers.soap import Soap

BYTES = 4  # of one moment of one element
OF_ADAM = 2 * BYTES
# Parameters of which each tensor rank has a part: rows of the vocabulary, heads, and units of the MLP.
SPLIT = re.compile(r"^(token_embedding|head)\.|attention\.qkv\.|mlp\.up\.|(projection|down)\.weight")


class ElementCounts(NamedTuple):
    """Numbers of elements of one tensor rank; of SOAP's states, of all tensor ranks together."""

    in_hidden_matrices: int  # inside of the blocks
    in_matrices: int  # embeddings included
    soap_states: int


@cache
def parameters_of_rank(model: ModelConfig, tensor_size: int) -> int:
    """Return the number of parameters on one tensor rank."""
    shapes = parameter_shapes(model, model.padded_vocab_size)
    return sum(math.prod(shape) // _num_parts(model, name, tensor_size) for name, shape in shapes)


def _num_parts(model: ModelConfig, name: str, tensor_size: int) -> int:
    """Return the number of equal parts of a parameter; heads of keys and values that ranks share are whole on each."""
    is_shared = "attention.qkv.kv_" in name and tensor_size > model.kv_heads
    return tensor_size if SPLIT.search(name) and not is_shared else 1


def moment_bytes(optimizer: OptimizerSettings, model: ModelConfig, tensor_size: int) -> float:
    """Return the mean bytes of optimizer states for each parameter of a rank: K - 4 in the paper's words."""
    if optimizer.name == "adamw":
        return float(OF_ADAM)
    if optimizer.name == "sgd":
        return float(BYTES * bool(optimizer.momentum))
    counts, num_parameters = count_elements(model, tensor_size), parameters_of_rank(model, tensor_size)
    match optimizer.name:
        case "adamw8bit":  # two bytes, and two scales for a block
            share, bytes_each = counts.in_matrices / num_parameters, 2 + OF_ADAM / BLOCK
        case "muon":
            share, bytes_each = counts.in_hidden_matrices / num_parameters, BYTES
        case _:  # soap
            share = counts.in_hidden_matrices / num_parameters
            bytes_each = BYTES * (counts.soap_states / tensor_size) / num_parameters / share
    return bytes_each * share + OF_ADAM * (1 - share)


@cache
def count_elements(model: ModelConfig, tensor_size: int) -> ElementCounts:
    """Return the counts of a model, extrapolated from one and two layers.

    A deep model takes long to build, even on the meta device.
    """
    one_layer, two_layers = (_count_in_model(replace(model, num_layers=n), tensor_size) for n in (1, 2))
    layers = zip(one_layer, two_layers, strict=True)
    return ElementCounts(*(one + (model.num_layers - 1) * (two - one) for one, two in layers))


@cache
def _count_in_model(model: ModelConfig, tensor_size: int) -> ElementCounts:
    with torch.device("meta"):
        gpt = GPT(model, ReplicatedTokens(Axis("tensor", tensor_size, 0, CommLog())))
    named, split, packed = list(gpt.named_parameters()), split_dims(gpt), packed_rows(gpt)
    hidden = [(name, param) for name, param in named if is_hidden_matrix(name, param)]
    hidden_matrices = [
        matrix
        for name, param in hidden
        for matrix in matrices_of(name, param.shape, 0, packed.get(name), split.get(name), tensor_size)
    ]
    return ElementCounts(
        in_hidden_matrices=sum(param.numel() for _, param in hidden),
        in_matrices=sum(param.numel() for _, param in named if param.dim() > 1),
        soap_states=sum(Soap.matrix_state_numel(matrix.whole_shape) for matrix in hidden_matrices),
    )
