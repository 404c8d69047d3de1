"""The whole state of a module whose parameters are partitioned, collected by the first rank."""

from typing import Any

import torch
from torch import Tensor, nn

from zero.engine import ZeroDataParallel


def full_state_dict(model: ZeroDataParallel) -> dict[str, Any]:
    """Return what `state_dict()` of the module inside `model` returns without partitioning, in memory of the CPU.

    All ranks must call this together; the first data-parallel rank gets the state, and the others an empty dictionary.
    Parameters are unsharded a unit at a time, so that the accelerator never holds all of them.
    """
    is_first = model.data.rank == 0
    state = model.module.state_dict(keep_vars=True)  # of parameters it reads no values
    full: dict[int, Tensor] = {}
    for params in model.params_by_unit():
        with torch.no_grad(), model.gathered(params):
            if is_first:
                full.update({id(param): param.detach().to("cpu", copy=True) for param in params})
    return {name: _value(value, full) for name, value in state.items()} if is_first else {}


def _value(value: Any, full: dict[int, Tensor]) -> Any:
    if isinstance(value, nn.Parameter) and id(value) in full:
        return full[id(value)]
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
