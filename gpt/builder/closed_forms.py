"""The parameters of one tensor rank, and the bytes of their optimizer states, without building the model."""

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import assert_never

import zero
from gpt.settings.optimizer import OptimizerSettings
from gpt.settings.training import TrainSettings
from gpt.shape.config import ROWS_PER_UNIT, ModelConfig, parameter_shapes

BYTES = 4  # of one moment of one element
OF_ADAM = 2 * BYTES
# Parameters of which each tensor rank has a part: rows of the vocabulary, heads, and units of the MLP.
SPLIT = re.compile(r"^(token_embedding|head)\.|attention\.qkv\.|mlp\.up\.|(projection|down)\.weight")


@cache
def parameters_of_rank(model: ModelConfig, tensor_size: int) -> int:
    """Return the number of parameters on one tensor rank."""
    return sum(numel for _, _, numel in _parameters(model, tensor_size))


def coded_parameters_of_rank(model: ModelConfig, train: TrainSettings, tensor_size: int) -> int:
    """Return the number of parameters on one tensor rank that products in FP8 read, and that can be gathered so."""
    return sum(
        numel
        for name, shape, numel in _parameters(model, tensor_size)
        if len(shape) > 1 and train.fp8.takes(name, model.num_layers) and not _is_shared(name, model, tensor_size)
    )


def _is_shared(name: str, model: ModelConfig, tensor_size: int) -> bool:
    """Return whether tensor ranks share a weight, of which each applies some rows."""
    return "attention.qkv.kv_" in name and tensor_size > model.kv_heads


def _parameters(model: ModelConfig, tensor_size: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield (name, whole shape, elements of one tensor rank); heads that ranks share are whole on each."""
    for name, shape in parameter_shapes(model, model.padded_vocab_size):
        num_parts = tensor_size if SPLIT.search(name) and not _is_shared(name, model, tensor_size) else 1
        yield name, shape, math.prod(shape) // num_parts


@cache
def moment_bytes(optimizer: OptimizerSettings, model: ModelConfig, tensor_size: int) -> float:
    """Return the mean bytes of optimizer states for each parameter of a rank: K - 4 in the paper's words."""
    matrices = [(name, shape, numel) for name, shape, numel in _parameters(model, tensor_size) if len(shape) > 1]
    hidden = [(name, shape, numel) for name, shape, numel in matrices if name.startswith("blocks.")]
    packed = [_matrices_in(model, name, shape) for name, shape, _ in hidden]
    match optimizer.name:
        case "adamw8bit":  # two bytes, and two scales for a block
            bytes_each = 2 + OF_ADAM / zero.AdamW8bit.granularity
            updated, state_bytes = matrices, bytes_each * sum(numel for _, _, numel in matrices)
        case "adamw_bf16":
            updated, state_bytes = matrices, OF_ADAM / 2 * sum(numel for _, _, numel in matrices)
        case "muon":
            updated, state_bytes = hidden, BYTES * sum(numel for _, _, numel in hidden)
            if optimizer.muon.row_beta is not None:  # tensor ranks divide the states of whole matrices
                state_bytes += BYTES * sum(shape[0] for _, shape, _ in hidden) / tensor_size
        case "soap":  # so does it
            whole = (number * 2 * (m * n + m * m + n * n) for number, m, n in packed)
            updated, state_bytes = hidden, BYTES * sum(whole) / tensor_size
        case "sgd":
            return float(BYTES * bool(optimizer.momentum))
        case "adamw":
            return float(OF_ADAM)
        case unknown:
            assert_never(unknown)
    num_parameters = parameters_of_rank(model, tensor_size)
    by_adam = num_parameters - sum(numel for _, _, numel in updated)
    return (state_bytes + OF_ADAM * by_adam) / num_parameters


def _matrices_in(model: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the number, the rows and the columns of the matrices that a weight packs by rows."""
    packed = {"attention.qkv.weight": 3, "attention.qkv.kv_weight": 2, "mlp.up.weight": ROWS_PER_UNIT[model.mlp]}
    number = next((number for end, number in packed.items() if name.endswith(end)), 1)
    return number, shape[0] // number, shape[1]
