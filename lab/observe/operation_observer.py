"""Observers of operations: instruments that see every operation of a run, real or dry, after it has returned.

All observers share one dispatch mode, because each further mode costs more than a fake operation.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from lab.observe.fake_tensors import QuickFakeTensorMode
from parallel.torch_internals import OpOverload, UnguardedDispatchMode, active_dispatch_modes


class OperationObserver(Protocol):
    """An object that is called after every operation."""

    def on_operation(
        self, function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None: ...


class ObservedMode(UnguardedDispatchMode):
    """A dispatch mode that reports operations on real tensors; `QuickFakeTensorMode` reports those on fake ones."""

    def __init__(self) -> None:
        super().__init__()
        self.observers: list[OperationObserver] = []

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        for observer in self.observers:
            observer.on_operation(function, args, kwargs, output)
        return output


@contextmanager
def observe_operations(observer: OperationObserver) -> Iterator[None]:
    """Report the operations of this block to `observer`, after the observers that are active already.

    Enter a mode of fake tensors before, not inside the block: it would take the operations before they are reported.
    """
    modes = active_dispatch_modes()
    if modes and isinstance(modes[-1], (ObservedMode, QuickFakeTensorMode)):
        observers = modes[-1].observers
        observers.append(observer)
        try:
            yield
        finally:
            observers.remove(observer)
    else:
        with ObservedMode(), observe_operations(observer):
            yield
