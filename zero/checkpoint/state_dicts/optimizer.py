"""The states of a torch optimizer of pieces as torch's `state_dict` has them: by parameter, whose tensors are shards.

Only the first piece of a parameter has its counters there; after a load, the others take them from it.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.validation.errors import ConfigError
from zero.checkpoint.state_dicts.chunked_tensor import ChunkedTensor, ParameterChunks
from zero.core.optimizer import ShardedOptimizer
from zero.core.step.parameter_groups import load_settings, settings_of
from zero.core.step.pieces import Piece

logger = logging.getLogger(__name__)

REMEDY = "use `save` and `load` of zero"


def state_dict(optimizer: ShardedOptimizer, chunks: ParameterChunks) -> dict[str, Any]:
    """Return views of the states, by the numbers that torch gives to parameters; missing ones are made, of zeros.

    With most optimizers the first step from zeros is that without states; of others a warning says so. Raises
    ConfigError if a state is neither a number nor one value for each element.
    """
    groups, pieces = optimizer.param_groups, optimizer.pieces
    numbers: dict[nn.Parameter, int] = {}
    for param in (param for group in groups for param in group["params"]):
        numbers[param] = len(numbers)
    master = next(iter(pieces.owned)).master
    inners = [optimizer.update_of(number).optimizer for number in range(len(groups))]
    blank = [_state_of_small_parameter(inner, group, master) for inner, group in zip(inners, groups, strict=True)]
    new = {piece.group for owned in pieces.by_param.values() for piece in owned if not optimizer.states_of(piece)}
    begins_elsewhere = (n for n in new if not _begins_with_zeros(inners[n], master, groups[n], blank[n]))
    for name in sorted({type(inners[number]).__name__ for number in begins_elsewhere}):
        logger.warning(
            "the states of %s, which do not exist before its first step, do not begin with zeros, as this state "
            "dict does: load saved ones before the next step, or take a state dict after it",
            name,
        )
    state = {}
    for param, owned in pieces.by_param.items():
        state[numbers[param]] = _state(optimizer, owned, blank[pieces.group_of[param]], chunks.names[param], chunks)
    of_groups = [settings_of(group) | {"params": [numbers[param] for param in group["params"]]} for group in groups]
    return {"state": state, "param_groups": of_groups}


def _state(
    optimizer: ShardedOptimizer, owned: list[Piece], blank: dict[str, Tensor], name: str, chunks: ParameterChunks
) -> dict[str, Tensor]:
    for piece in owned:
        settings = optimizer.param_groups[piece.group]
        is_beside_param = optimizer.update_of(piece.group).counts_on_device or settings.get("capturable")
        state = optimizer.states_of(piece)
        for kind, like in {} if state else blank.items():  # counters: those of offloaded parts are elsewhere
            device = piece.param.device if like.dim() or is_beside_param else like.device
            state[kind] = torch.zeros_like(piece.param if like.dim() else like, dtype=like.dtype, device=device)
    found: dict[str, Tensor] = {}
    for kind, like in blank.items():
        values = [(piece.in_param, optimizer.states_of(piece)[kind]) for piece in owned]
        if like.dim():
            found[kind] = chunks.cut(name, values, like.dtype)
        else:
            found[kind] = chunks.counter(name, [value for _, value in values], like)
    return found


def load_state_dict(optimizer: ShardedOptimizer, chunks: ParameterChunks, given: Mapping[str, Any]) -> None:
    """Load the result of `state_dict`, or one with whole tensors, whose parameters are in the same groups and order.

    States that it lacks begin at zero, and settings of the groups change. Raises ConfigError if it does not fit.
    """
    own = state_dict(optimizer, chunks)
    here, there = ([len(group["params"]) for group in one["param_groups"]] for one in (own, given))
    if here != there:
        raise ConfigError(
            f"the state dict has groups of {there} parameters and the optimizer of {here}; give it the groups of then"
        )
    loads = list(_loads(own, given))  # all of them are checked before any is loaded
    for shard, parts in loads:
        shard.load(parts)
    for group, theirs in zip(optimizer.param_groups, given["param_groups"], strict=True):
        load_settings(group, settings_of(theirs))
    for first, *others in filter(None, optimizer.pieces.by_param.values()):
        for kind, value in optimizer.states_of(first).items():
            for piece in others if isinstance(value, Tensor) and not value.dim() else ():
                optimizer.states_of(piece)[kind].copy_(value)


def _loads(own: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[ChunkedTensor, list[Tensor]]]:
    """Yield each shard with what is loaded into it: zeros, if the given state has nothing of a parameter."""
    for mine, theirs in zip(own["param_groups"], given["param_groups"], strict=True):
        for number, key in zip(mine["params"], theirs["params"], strict=True):
            shards, values = own["state"].get(number, {}), given["state"].get(key, {})
            if values and values.keys() != shards.keys():
                raise ConfigError(
                    f"the state dict has {', '.join(values)} of parameter {key} and the optimizer "
                    f"{', '.join(shards) or 'nothing'}; load the state of an optimizer of the same class"
                )
            for kind, shard in shards.items():
                zeros = torch.zeros(()).expand(shard.shape)
                yield shard, shard.parts_of(f"{kind} of parameter {key}", values.get(kind, zeros))


def _state_of_small_parameter(inner: Optimizer, group: dict[str, Any], master: Tensor) -> dict[str, Tensor]:
    """Return the state that the optimizer has after a step of a small parameter with as many dims as the group's own.

    Raises ConfigError if a part of it is neither a tensor of one number nor one of the parameter's shape.
    """
    dims = {param.dim() for param in group["params"]}
    param = nn.Parameter(master.new_ones([2] * max(dims, default=1)))
    stepped = _stepped(inner, group, param, {})
    state = {kind: value for kind, value in stepped.items() if value is not None}
    for kind, value in state.items():
        if not isinstance(value, Tensor) or (value.dim() and value.shape != param.shape):
            raise ConfigError(f"{kind} of {type(inner).__name__} is not one value for each element; {REMEDY}")
    return state


def _begins_with_zeros(inner: Optimizer, master: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> bool:
    """Return whether the first step from states of zeros is that of an optimizer that has none."""
    shape = next((value.shape for value in state.values() if value.dim()), torch.Size([1]))
    params = [nn.Parameter(master.new_ones(shape)) for _ in range(2)]
    for param, given in zip(params, ({}, state), strict=True):
        _stepped(inner, group | {"lr": 0.1}, param, {kind: torch.zeros_like(value) for kind, value in given.items()})
    return params[0].equal(params[1])


def _stepped(inner: Optimizer, group: dict[str, Any], param: nn.Parameter, state: dict[str, Tensor]) -> dict[str, Any]:
    """Return the state after a step of one parameter, whose gradient is its values."""
    param.grad = param.detach().clone()
    probe: Any = type(inner)([{**group, "params": [param]}])  # type: ignore[call-arg]
    if state:
        probe.state[param].update(state)
    probe.step()
    return probe.state[param]
