"""Computes the bytes of model states on one rank by the paper's formula.

`zero/checkpoint/resident.py` measures them.
"""

from collections.abc import Container
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from zero.core.partition.stage import Division, Lifetime, ShardingPolicy


@dataclass(frozen=True)
class ModelStates:
    """The bytes of each kind of model state on one rank.

    `moments` is the optimizer's state without the master weights: for Adam, both moments in fp32.
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
    gradient_bytes: int | None = None,
    group_size: int | None = None,
) -> ModelStates:
    """Return the bytes of model states that a rank holds (paper, section 3.1 and figure 1).

    `parameter_bytes` and `moment_bytes` are the bytes of one parameter and of its moments, `gradient_bytes` the bytes
    of its gradient in `ZeroConfig.accumulate_dtype`; None: as many as of the parameter. Master weights take 4 bytes a
    parameter, but parameters of 4 bytes or more are their own master weights. The paper's K is 4 + `moment_bytes`: 12
    for Adam in mixed precision. `data_size` is the number N of data-parallel ranks, `group_size` the size G of the
    groups that divide the states; None: N. With parameter_bytes=2 a parameter takes 16 bytes in stage 0, 4 + 12/N in
    stage 1, 2 + 14/N in stage 2 and 16/N in stage 3; with gradient_bytes=4 too, 18, 6 + 12/N, 2 + 16/N and 18/N, and
    with groups 2/G + 4/G + 12/G in stage 3, or 12/N if all ranks divide the optimizer's states.
    """

    def on_one_rank(bytes_each: float, division: Division) -> float:
        return num_parameters * bytes_each / division.num_ranks(data_size, group_size or data_size)

    gradients = Division.NONE if policy.full_grads is Lifetime.PERSISTENT else policy.gradients
    return ModelStates(
        parameters=on_one_rank(parameter_bytes, policy.parameters),
        gradients=on_one_rank(parameter_bytes if gradient_bytes is None else gradient_bytes, gradients),
        master=on_one_rank(4 if parameter_bytes < 4 else 0, policy.optimizer),
        moments=on_one_rank(moment_bytes, policy.optimizer),
    )


def placed(states: ModelStates, policy: ShardingPolicy, group_size: int, offloaded: Container[str]) -> PlacedStates:
    """Return the bytes in each memory if the states that `offloaded` names are placed on the host.

    `states` is a result of `formula`. `offloaded` may contain "optimizer" (owned gradients, master weights and moments)
    and "parameters" (the shards of transient ones). Full buffers that persist stay on the accelerator, so owned
    gradients on the host are additional memory if full gradients persist.
    """
    persists = policy.full_grads is Lifetime.PERSISTENT
    # `states.gradients` are the full gradients if these persist, else the shards of a group.
    owned_gradients = states.gradients / (group_size if persists and policy.divides_optimizer else 1)
    optimizer = "optimizer" in offloaded
    parameters = "parameters" in offloaded and policy.full_params is Lifetime.TRANSIENT
    on_host = ModelStates(
        parameters=states.parameters * parameters,
        gradients=owned_gradients * optimizer,
        master=states.master * optimizer,
        moments=states.moments * optimizer,
    )
    kinds = (field.name for field in fields(ModelStates))
    rest = ModelStates(**{kind: getattr(states, kind) - getattr(on_host, kind) for kind in kinds})
    return PlacedStates(replace(rest, gradients=states.gradients) if persists else rest, on_host)
