"""Hooks before and after the modules of a model, which its copies do not have and torch.compile does not trace."""

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from parallel.autograd_internals import name_hook, never_begin_graph, restore_parameter_tables, run_first, run_last
from parallel.torch_internals import load_compiler
from zero.core.units.unit import Unit, innermost_unit

load_compiler()


Cast = Callable[[tuple[tuple, dict]], tuple[tuple, dict]]
"""A cast of what a function is called with."""


class CallObserver(Protocol):
    """An observer of the calls of modules."""

    def end_abandoned_calls(self) -> None: ...

    def before_forward(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict) -> None: ...

    def after_forward(self, unit: Unit, module: nn.Module, output: Any) -> None: ...

    def is_running(self, unit: Unit) -> bool: ...


class PersistentHooks:
    """The hooks of a model whose parameters persist: none around forwards."""

    def __init__(self, begin_forward: Callable[[], None]):
        self.begin = torch.compiler.disable(begin_forward)
        self.handles: list[RemovableHandle] = []
        self._methods: list[tuple[nn.Module, str]] = []

    def register_method(self, module: nn.Module, name: str, cast: Cast | None) -> None:
        """Cast what a method is called with: whatever runs can read the parameters."""
        if cast:
            self._replace(module, name, lambda *_: None, lambda _: None, cast)

    def _replace(
        self,
        module: nn.Module,
        name: str,
        before: Callable[[tuple, dict], None],
        after: Callable[[Any], None],
        cast: Cast | None,
    ) -> None:
        """Let a method call `before` and `after` until `remove`; nothing changes if it does already."""
        if not isinstance(vars(module).get(name), ForwardMethod):
            setattr(module, name, ForwardMethod(module, name, before, after, cast))
            self._methods.append((module, name))

    def remove(self) -> None:
        """Remove all hooks and registered methods."""
        for handle in self.handles:
            handle.remove()
        while self._methods:
            delattr(*self._methods.pop())


class ModuleHooks(PersistentHooks):
    """Tells an observer of the calls of all modules with parameters, and of their methods that are registered.

    Any of these modules may be called by itself. `unit` is the smallest one that contains the module. The calls enclose
    the user's own hooks on the modules of units. If a module raises, `output` is None. If the observer says that a unit
    is running, a call of its modules is inside another one that has been reported.
    """

    def __init__(self, root: nn.Module, units: dict[str, Unit], observer: CallObserver):
        super().__init__(self._begin)
        self._root, self._observer = root, observer
        never_begin_graph(Hook.__call__)
        self.num_methods_running = 0  # registered ones, whose end is always noticed
        names: dict[nn.Module, list[str]] = {}
        for name, module in root.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name)
        self._unit_of = {
            module: units[innermost_unit([f"{name}." for name in aliases], units)] for module, aliases in names.items()
        }
        self._before_root = self._install(root, is_unit=True)
        for module, aliases in names.items():
            is_unit = not units.keys().isdisjoint(aliases)
            if module is not root and (is_unit or any(True for _ in module.parameters())):
                self._install(module, is_unit)

    def _begin(self) -> None:
        """Put the hooks of the root around the user's, before it is called; the forward begins with them.

        Below the root, a hook that is put before these reads parameters while the root runs, and so can gather them.
        """
        self._observer.end_abandoned_calls()
        run_first(self._root, self._before_root)

    def register_method(self, module: nn.Module, name: str, cast: Cast | None) -> None:
        """Treat a call of a method like a call of the module, and cast what it is called with."""
        self._replace(module, name, partial(self._before_method, module), partial(self._after_method, module), cast)

    def remove(self) -> None:
        """Remove all hooks and registered methods."""
        super().remove()
        restore_parameter_tables(self._root)

    def _before_method(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._observer.before_forward(self._unit_of[module], module, args, kwargs)
        self.num_methods_running += 1

    def _after_method(self, module: nn.Module, output: Any) -> None:
        self.num_methods_running -= 1
        self._observer.after_forward(self._unit_of[module], module, output)

    def _install(self, module: nn.Module, is_unit: bool) -> RemovableHandle:
        unit = self._unit_of[module]

        def after(module: nn.Module, _args: tuple, output: Any) -> None:
            self._observer.after_forward(unit, module, output)

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if is_unit:
                run_last(module, after_handle)
            self._observer.before_forward(unit, module, args, kwargs)

        def is_idle() -> bool:
            return not is_unit and self._observer.is_running(unit)

        after_handle = module.register_forward_hook(Hook(after, is_idle), always_call=True)
        before_handle = module.register_forward_pre_hook(Hook(before, is_idle), prepend=True, with_kwargs=True)
        for handle in (before_handle, after_handle):
            name_hook(handle, "zero")
        run_first(module, before_handle)
        self.handles += [before_handle, after_handle]
        return before_handle


class Hook:
    """A hook that does nothing in a copy of its module, in memory or in a file. See [Note: compiling]."""

    def __init__(self, function: Callable, is_idle: Callable[[], bool] = lambda: False):
        self._function = torch.compiler.disable(function)
        self._is_idle = torch.compiler.assume_constant_result(is_idle)

    def __call__(self, *args: Any) -> None:
        if not (torch.compiler.is_compiling() and self._is_idle()):
            self._function(*args)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Callable:
        return no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_no_hook, ()


def no_hook(*_: Any) -> None:
    """Do nothing."""


def _make_no_hook() -> Callable[..., None]:
    return no_hook


class ForwardMethod:
    """A method of a module that runs as its forward does; in a copy of the module, the method as its class has it."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        before: Callable[[tuple, dict], None],
        after: Callable[[Any], None],
        cast: Cast | None,
    ):
        self._module, self._name, self._cast = module, name, cast
        self._before, self._after = torch.compiler.disable(before), torch.compiler.disable(after)
        self._method = getattr(module, name)
        wraps(self._method)(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._cast:
            args, kwargs = self._cast((args, kwargs))
        self._before(args, kwargs)
        output = None
        try:
            output = self._method(*args, **kwargs)
        finally:
            self._after(output)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable:
        return MethodType(getattr(type(self._module), self._name), memo[id(self._module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)


# [Note: compiling] The compiler ends its graph at a hook, and runs the hook as it is: what it does depends on what
# other modules have run, which compiled code cannot repeat. A hook on a module inside a unit has nothing to do while
# its unit runs, and then leaves no trace in the graph. Whether it runs is asked once, when a function is compiled; if
# the function is called again while the unit is sharded, the parameters are of another class, and it is compiled again.
