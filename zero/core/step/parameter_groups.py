"""Torch's parameter groups: dicts of settings with a list of parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

Groups = list[dict[str, Any]]
# Settings that say how, not what, is computed.
IMPLEMENTATION = {"fused", "foreach", "capturable", "differentiable", "iterates_on"}


def as_groups(params: Iterable[Any]) -> Groups:
    """Return parameter groups with lists of parameters, from any form that torch's optimizers take.

    Raises ValueError if there is no parameter, or if one is in two groups, and TypeError for what is not one.
    """
    # Copies: torch writes to the dicts that it gets.
    given = params if isinstance(params, Tensor) else [dict(g) if isinstance(g, dict) else g for g in params]
    groups = Optimizer(given, {}).param_groups
    if not any(group["params"] for group in groups):
        raise ValueError("`groups` has no parameters; leave it out to train all parameters of the model")
    return [{key: value for key, value in group.items() if key != "param_names"} for group in groups]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def load_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Give a parameter group the settings of another run; how it computes them stays."""
    for name, value in settings.items():
        present = group.get(name)
        if isinstance(present, Tensor):  # a captured step reads this tensor
            present.fill_(value)
        elif name not in IMPLEMENTATION:
            value = tuple(value) if isinstance(value, list) else value
            group[name] = bool(value) if isinstance(present, bool) else value


def replace_settings(group: dict[str, Any], settings: dict[str, Any], params: list[nn.Parameter]) -> None:
    """Replace the content of a parameter group, in place since schedulers refer to it.

    Counters that are not in `settings`, because an optimizer made them since these were read, are removed.
    """
    group.clear()
    group.update(settings, params=params)
