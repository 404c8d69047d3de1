"""The bytes of the optimizer's states for each parameter, in closed form: K - 4 in the paper's words."""

from gpt.model.config import ModelConfig
from gpt.planner.activation_store import hidden_matrices_of_rank, parameters_of_rank
from gpt.settings import OptimizerSettings

BYTES = 4  # of one moment of one element


def moment_bytes(optimizer: OptimizerSettings, model: ModelConfig, tensor_size: int) -> float:
    """Return the bytes of optimizer states for each parameter of a rank, in the mean."""
    if optimizer.name == "adamw":
        return 2 * BYTES
    if optimizer.name == "sgd":
        return BYTES if optimizer.momentum else 0
    share = hidden_matrices_of_rank(model, tensor_size) / parameters_of_rank(model, tensor_size)
    return BYTES * share + 2 * BYTES * (1 - share)
