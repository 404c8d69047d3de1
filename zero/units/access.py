"""Noticing that a parameter is read: a module's own table of parameters, which reports each access."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel.autograd_internals import replace_parameter_table


class WatchedParameters(dict[str, Any]):
    """The dictionary of a module's parameters, which calls `on_access(param)` before it returns a parameter.

    Reading an attribute looks the name up here; iterating over all parameters does not. What torch.compile traces is
    not reported: see `WatchedParameter` for the parameters that a compiled function cannot read.
    """

    def __init__(self, on_access: Callable[[nn.Parameter], None], params: dict[str, Any]):
        super().__init__(params)
        self._on_access = on_access

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None and not torch.compiler.is_compiling():
            self._on_access(param)
        return param

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # copies of a module are not watched


def watch_parameters(module: nn.Module, on_access: Callable[[nn.Parameter], None]) -> None:
    """Call `on_access(param)` from now on before `some_submodule.name` returns that parameter."""
    for submodule in module.modules():
        replace_parameter_table(submodule, partial(WatchedParameters, on_access))
