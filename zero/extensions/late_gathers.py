"""Gathers of updated parameters that run while the next forward goes on: a module waits for its own."""

import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from parallel.mesh import Work
from zero.core.engine import Engine
from zero.core.partition.stage import Lifetime
from zero.core.protocols.extension import Extension
from zero.core.units.hooks import Hook
from zero.core.units.unit import find_units, innermost_unit


class LateGathers(Extension):
    """Takes the last gathers of an update; each parameter waits for its own when it is read.

    Until then the parameters are watched, so that any read in Python waits.
    """

    def __init__(self) -> None:
        self._gathers: dict[nn.Parameter, list[Work]] = {}  # that nobody has waited for

    def on_built(self, engine: Engine) -> None:
        self._engine_ref = weakref.ref(engine)
        if engine.config.policy.full_params is Lifetime.PERSISTENT:  # else units wait, which have hooks
            engine.end_with_engine(hook_readers(engine.module, self.before_read))

    def take_gathers(self, gathers: Sequence[tuple[Sequence[nn.Parameter], Work]]) -> bool:
        engine = self._engine_ref()
        assert engine is not None
        for params, gather in gathers:
            for param in params:
                self._gathers.setdefault(param, []).append(gather)
                engine.guard.watch(param)
        return True

    def before_read(self, params: Iterable[nn.Parameter] | None) -> None:
        if not self._gathers:
            return
        engine = self._engine_ref()  # None if its memory is being freed, with others that refer to it
        for param in [param for param in (self._gathers if params is None else params) if param in self._gathers]:
            for gather in self._gathers.pop(param):  # one that another parameter of the bucket waited for is complete
                gather.wait()
            if engine is not None:
                engine.guard.guard(param)


def hook_readers(root: nn.Module, before: Callable[[list[nn.Parameter]], None]) -> list[RemovableHandle]:
    """Call `before(params)` before a module runs that reads `params`; return the handles of the hooks.

    The modules are the elements of module lists (the blocks), each with all of its parameters, and outside of these
    every module that has parameters of its own.
    """
    blocks = find_units(root)
    params_of: dict[str, dict[nn.Parameter, None]] = {}
    modules = dict(root.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        reader = innermost_unit([f"{name}."], blocks) or name
        while reader and isinstance(modules[reader], (nn.ModuleList, nn.ModuleDict)):  # whose hooks would not run
            reader = reader.rpartition(".")[0]
        params_of.setdefault(reader, {}).update(dict.fromkeys(module.parameters(recurse=False)))
    handles = []
    for name, params in params_of.items():
        if params:
            hook = Hook(lambda *_, own=list(params): before(own))
            handles.append(modules[name].register_forward_pre_hook(hook, prepend=True))
    return handles
