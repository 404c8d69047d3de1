"""Noticing that somebody reads a parameter: a module's own table of parameters, with an eye on it."""

from collections.abc import Callable
from typing import Any

from torch import nn


class WatchedParameters(dict[str, Any]):
    """What `nn.Module` keeps in `_parameters`. Attribute access looks names up here; walking over all does not."""

    def __init__(self, params: dict[str, Any], on_access: Callable[[nn.Parameter], None]):
        super().__init__(params)
        self._on_access = on_access

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None:
            self._on_access(param)
        return param

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # copies of a module are not watched


def watch_parameters(module: nn.Module, on_access: Callable[[nn.Parameter], None]) -> None:
    """From now on `on_access(param)` is called before `some_submodule.name` gives that parameter to anyone."""
    for submodule in module.modules():
        submodule._parameters = WatchedParameters(submodule._parameters, on_access)
