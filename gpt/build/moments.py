"""The bytes of the optimizer's states for each parameter, in closed form: K - 4 in the paper's words."""

from gpt.build.activation_store import (
    hidden_matrices_of_rank,
    matrices_of_rank,
    parameters_of_rank,
    soap_states_of_rank,
)
from gpt.settings.optimizer import OptimizerSettings
from gpt.shape.config import ModelConfig
from zero.optimizers.adamw8bit import BLOCK

BYTES = 4  # of one moment of one element
OF_ADAM = 2 * BYTES


def moment_bytes(optimizer: OptimizerSettings, model: ModelConfig, tensor_size: int) -> float:
    """Return the bytes of optimizer states for each parameter of a rank, in the mean."""
    num_parameters = parameters_of_rank(model, tensor_size)
    match optimizer.name:
        case "adamw8bit":  # two bytes, and two scales for a block
            share, bytes_each = matrices_of_rank(model, tensor_size) / num_parameters, 2 + OF_ADAM / BLOCK
        case "muon":
            share, bytes_each = hidden_matrices_of_rank(model, tensor_size) / num_parameters, BYTES
        case "soap":
            share = hidden_matrices_of_rank(model, tensor_size) / num_parameters
            bytes_each = BYTES * soap_states_of_rank(model, tensor_size) / num_parameters / share
        case "sgd":
            share, bytes_each = 1.0, BYTES * bool(optimizer.momentum)
        case _:
            share, bytes_each = 1.0, OF_ADAM
    return bytes_each * share + OF_ADAM * (1 - share)
