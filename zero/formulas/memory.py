"""Bytes of model states on one rank: what the paper's formula promises, and what is there."""

from collections.abc import Container
from dataclasses import dataclass, fields

from zero.offload.placement import Placement, State
from zero.stage import Lifetime, ShardingPolicy


@dataclass(frozen=True)
class ModelStates:
    """In bytes. `moments` is all of the optimizer's state but the master weights: for Adam both moments, in fp32."""

    parameters: float
    gradients: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def formula(
    policy: ShardingPolicy,
    num_parameters: float,
    data_size: int,
    parameter_bytes: int = 2,
    moment_bytes: float = 8,
) -> ModelStates:
    """Paper, section 3.1 and figure 1, with K = 4 (master) + `moment_bytes` = 12 for Adam in mixed precision.

    `data_size` is that of the shard axis. At parameter_bytes=2: 16 (stage 0), 4 + 12/N (1), 2 + 14/N (2), 16/N (3)
    times the parameters. Parameters of four bytes or more are their own master weights.
    """

    def resident(bytes_each: float, is_divided: bool) -> float:
        return num_parameters * bytes_each / (data_size if is_divided else 1)

    return ModelStates(
        parameters=resident(parameter_bytes, policy.full_params is Lifetime.TRANSIENT),
        gradients=resident(parameter_bytes, policy.full_grads is Lifetime.TRANSIENT),
        master=resident(4 if parameter_bytes < 4 else 0, policy.shard_optimizer),
        moments=resident(moment_bytes, policy.shard_optimizer),
    )


def placed(
    states: ModelStates, policy: ShardingPolicy, data_size: int, leaves: Container[State]
) -> dict[Placement, ModelStates]:
    """Where the states of `formula` lie if those that `leaves` names are on the host.

    What persists in full stays on the accelerator; of full gradients the host has a copy of those it owns.
    """
    persists = policy.full_grads is Lifetime.PERSISTENT
    owned_gradients = states.gradients / (data_size if persists and policy.shard_optimizer else 1)
    optimizer, parameters = "optimizer" in leaves, "parameters" in leaves and policy.full_params is Lifetime.TRANSIENT
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
    return {Placement.ACCELERATOR: on_accelerator, Placement.HOST: on_host}
