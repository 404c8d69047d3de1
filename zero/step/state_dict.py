"""The states of a torch optimizer of pieces as torch's `state_dict` has them: by parameter, whose tensors are shards.

Only the first piece of a parameter has its counters there; after a load, the others take them from it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.errors import ConfigError
from zero.buckets.parameter_chunks import ParameterChunks
from zero.step.bucketed_optimizer import load_settings, settings_of
from zero.step.pieces import OwnedPieces, Piece

REMEDY = "use `save` and `load` of zero"


def state_dict(inner: Optimizer, pieces: OwnedPieces, chunks: ParameterChunks) -> dict[str, Any]:
    """Return views of the states, by the numbers that torch gives to parameters; missing ones are made, of zeros.

    Raises ConfigError if a state is neither a number nor one value for each element.
    """
    numbers: dict[nn.Parameter, int] = {}
    for param in (param for group in inner.param_groups for param in group["params"]):
        numbers[param] = len(numbers)
    master = next(iter(pieces.owned)).master
    blank = [_state_of_small_parameter(inner, group, master) for group in inner.param_groups]
    state = {
        numbers[param]: _state(inner, owned, blank[pieces.group_of[param]], chunks.names[param], chunks)
        for param, owned in pieces.by_param.items()
    }
    groups = [
        settings_of(group) | {"params": [numbers[param] for param in group["params"]]} for group in inner.param_groups
    ]
    return {"state": state, "param_groups": groups}


def _state(
    inner: Optimizer, owned: list[Piece], blank: dict[str, Tensor], name: str, chunks: ParameterChunks
) -> dict[str, Tensor]:
    for piece in owned:
        state = inner.state[piece.param]
        for kind, like in {} if state else blank.items():
            state[kind] = torch.zeros_like(piece.param, dtype=like.dtype) if like.dim() else torch.zeros_like(like)
    found: dict[str, Tensor] = {}
    for kind, like in blank.items():
        values = [(piece.in_param, inner.state[piece.param][kind]) for piece in owned]
        if like.dim():
            found[kind] = chunks.cut(name, values, like.dtype)
        else:
            found[kind] = chunks.counter(name, [value for _, value in values], like)
    return found


def load_state_dict(inner: Optimizer, pieces: OwnedPieces, chunks: ParameterChunks, given: Mapping[str, Any]) -> None:
    """Load the result of `state_dict`, or one with whole tensors, whose parameters are in the same groups and order.

    States that it lacks begin at zero, and settings of the groups change. Raises ConfigError if it does not fit.
    """
    own = state_dict(inner, pieces, chunks)
    here, there = ([len(group["params"]) for group in one["param_groups"]] for one in (own, given))
    if here != there:
        raise ConfigError(
            f"the state dict has groups of {there} parameters and the optimizer of {here}; give it the groups of then"
        )
    for group, mine, theirs in zip(inner.param_groups, own["param_groups"], given["param_groups"], strict=True):
        for number, key in zip(mine["params"], theirs["params"], strict=True):
            values = given["state"].get(key, {})
            for kind, shard in own["state"].get(number, {}).items():
                shard.load(f"{kind} of parameter {key}", values.get(kind, torch.zeros(()).expand(shard.shape)))
        load_settings(group, settings_of(theirs))
    for first, *others in filter(None, pieces.by_param.values()):
        for kind, value in inner.state[first.param].items():
            for piece in others if isinstance(value, Tensor) and not value.dim() else ():
                inner.state[piece.param][kind].copy_(value)


def _state_of_small_parameter(inner: Optimizer, group: dict[str, Any], master: Tensor) -> dict[str, Tensor]:
    """Return the state that the optimizer has after a step of a small parameter with as many dims as the group's own.

    Raises ConfigError if a part of it is neither a number nor one value for each element.
    """
    dims = {param.dim() for param in group["params"]}
    param = nn.Parameter(master.new_zeros([2] * max(dims, default=1)))
    param.grad = torch.zeros_like(param)
    probe: Any = type(inner)([{**group, "params": [param]}])  # type: ignore[call-arg]
    probe.step()
    state = {kind: value for kind, value in probe.state[param].items() if isinstance(value, Tensor)}
    for kind, value in state.items():
        if value.dim() and value.shape != param.shape:
            raise ConfigError(f"{kind} of {type(inner).__name__} is not one value for each element; {REMEDY}")
    return state
