"""Bytes of model states on one rank, by the paper's formula. `zero/state/resident.py` measures the real ones."""

from collections.abc import Container
from dataclasses import dataclass, fields
from typing import NamedTuple

from zero.stage import Lifetime, ShardingPolicy


@dataclass(frozen=True)
class ModelStates:
    """The bytes of each kind of model state.

    `moments` is all of the optimizer's state except the master weights: for Adam both moments, in fp32.
    """

    parameters: float
    gradients: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


class PlacedStates(NamedTuple):
    """The model states in each of the two memories that a rank uses."""

    accelerator: ModelStates
    host: ModelStates


def formula(
    policy: ShardingPolicy,
    num_parameters: float,
    data_size: int,
    parameter_bytes: int = 2,
    moment_bytes: float = 8,
) -> ModelStates:
    """Return the bytes of model states that a rank holds (paper, section 3.1 and figure 1).

    The paper's K is 4 (master weights) + `moment_bytes`: 12 for Adam in mixed precision. `data_size` is the size N of
    the shard axis. With parameter_bytes=2 a parameter takes 16 (stage 0), 4 + 12/N (1), 2 + 14/N (2) or 16/N (3) bytes.
    Parameters of four bytes or more are their own master weights.
    """

    def resident(bytes_each: float, is_divided: bool) -> float:
        return num_parameters * bytes_each / (data_size if is_divided else 1)

    return ModelStates(
        parameters=resident(parameter_bytes, policy.full_params is Lifetime.TRANSIENT),
        gradients=resident(parameter_bytes, policy.full_grads is Lifetime.TRANSIENT),
        master=resident(4 if parameter_bytes < 4 else 0, policy.shard_optimizer),
        moments=resident(moment_bytes, policy.shard_optimizer),
    )


def placed(states: ModelStates, policy: ShardingPolicy, data_size: int, offloaded: Container[str]) -> PlacedStates:
    """Return the part of `states` that is in each memory, if `offloaded` names those that are placed on the host.

    `offloaded` may contain "optimizer" (owned gradients, master weights and moments) and "parameters" (their shards).
    Full buffers that persist stay on the accelerator. If full gradients persist, the host has a copy of the owned ones.
    """
    persists = policy.full_grads is Lifetime.PERSISTENT
    owned_gradients = states.gradients / (data_size if persists and policy.shard_optimizer else 1)
    optimizer = "optimizer" in offloaded
    parameters = "parameters" in offloaded and policy.full_params is Lifetime.TRANSIENT
    on_host = ModelStates(
        parameters=states.parameters * parameters,
        gradients=owned_gradients * optimizer,
        master=states.master * optimizer,
        moments=states.moments * optimizer,
    )
    on_accelerator = ModelStates(
        parameters=states.parameters - on_host.parameters,
        gradients=states.gradients if persists else states.gradients - on_host.gradients,
        master=states.master - on_host.master,
        moments=states.moments - on_host.moments,
    )
    return PlacedStates(on_accelerator, on_host)
