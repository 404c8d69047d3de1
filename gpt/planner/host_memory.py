"""A check, before anything is allocated, that a node's memory can hold the states that its ranks offload."""

import torch

from gpt.model.transformer import ModelConfig
from gpt.planner.activation_store import parameters_of_rank
from parallel.errors import ConfigError
from parallel.host_memory import available_bytes
from parallel.mesh import Mesh
from parallel.world import World
from zero.config import ZeroConfig
from zero.formulas import memory
from zero.offload.placement import OffloadConfig


def check_host_memory(
    model: ModelConfig, dtype: torch.dtype, zero: ZeroConfig, offload: OffloadConfig, mesh: Mesh, world: World
) -> None:
    """Raise ConfigError if the node's available memory is too small. An imitated world always passes."""
    if not offload.offloaded_states or world.imitated_backend:
        return
    needed = bytes_on_host(model, dtype, zero, offload, mesh) * world.local_size
    available = available_bytes()
    if needed > available:
        raise ConfigError(
            f"offload.mode={offload.mode} places {needed / 1e9:,.1f} GB of model states in the memory of this "
            f"node ({world.local_size} ranks), where {available / 1e9:,.1f} GB are free: "
            f"{(needed - available) / 1e9:,.1f} too much; use more nodes, a higher zero.stage, or fewer offload.states"
        )


def bytes_on_host(
    model: ModelConfig, dtype: torch.dtype, zero: ZeroConfig, offload: OffloadConfig, mesh: Mesh
) -> float:
    """Return the bytes of model states that one rank places in host memory; with offload.mode=auto, an upper bound."""
    policy = zero.policy
    shard_size = policy.axes(mesh.data)[0].size
    num_parameters = parameters_of_rank(model, mesh.tensor.size)
    gradient_bytes = zero.gradient_types(dtype).accumulate.itemsize
    states = memory.formula(policy, num_parameters, shard_size, dtype.itemsize, gradient_bytes=gradient_bytes)
    return memory.placed(states, policy, shard_size, offload.offloaded_states).host.total
