"""Seeing every operation when it has returned: for the instruments that measure a run, real or dry.

One of torch's modes serves all of them, since an operation's way through another costs more than a fake operation.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from parallel.instruments.fake_tensors import QuickFakeTensorMode


class Watcher(Protocol):
    def saw(self, function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None: ...


class WatchedMode(TorchDispatchMode):
    """Operations on real tensors; `QuickFakeTensorMode` tells of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.watchers: list[Watcher] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiler is near, and its guard would double the time of an operation

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        for watcher in self.watchers:
            watcher.saw(function, args, kwargs, output)
        return output


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """In here `watcher` sees operations after those that watch already: enter it after a mode of fake tensors."""
    stack = _get_current_dispatch_mode_stack()
    if stack and isinstance(stack[-1], (WatchedMode, QuickFakeTensorMode)):
        watchers = stack[-1].watchers
        watchers.append(watcher)
        try:
            yield
        finally:
            watchers.remove(watcher)
    else:
        with WatchedMode(), watching(watcher):
            yield


def active_watchers() -> list[Watcher]:
    modes = _get_current_dispatch_mode_stack()
    return [w for mode in modes if isinstance(mode, (WatchedMode, QuickFakeTensorMode)) for w in mode.watchers]
