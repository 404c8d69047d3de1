"""Whether a node's memory holds what its ranks would place there, asked before anything is allocated."""

import os
from pathlib import Path

from gpt.planner.activation_store import parameters_of_rank
from gpt.settings import Settings
from parallel.errors import ConfigError
from parallel.mesh import Mesh
from parallel.world import World
from zero.formulas import memory


def check_host_memory(settings: Settings, mesh: Mesh, world: World) -> None:
    """Raises ConfigError. An imitated world's memory is not this machine's."""
    if not settings.offload.offloaded_states or world.imitated_backend:
        return
    needed = bytes_on_host(settings, mesh) * world.local_size
    available = available_bytes()
    if needed > available:
        raise ConfigError(
            f"offload.mode={settings.offload.mode} places {needed / 1e9:,.1f} GB of model states in the memory of this "
            f"node ({world.local_size} ranks), where {available / 1e9:,.1f} GB are free: "
            f"{(needed - available) / 1e9:,.1f} too much; use more nodes, a higher zero.stage, or fewer offload.states"
        )


def bytes_on_host(settings: Settings, mesh: Mesh) -> float:
    """Model states that one rank places there; with auto, at most."""
    policy = settings.zero.policy
    shard_size = policy.axes(mesh.data)[0].size
    num_parameters = parameters_of_rank(settings.model, mesh.tensor.size)
    states = memory.formula(policy, num_parameters, shard_size, settings.train.dtype.itemsize)
    return memory.placed(states, policy, shard_size, settings.offload.offloaded_states).host.total


def available_bytes() -> int:
    """What can be had without swapping, as Linux says; elsewhere, what is installed."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
