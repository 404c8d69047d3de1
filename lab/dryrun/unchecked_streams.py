"""Streams of a dry run that imitates GPUs: operations are launched as on a GPU, and nothing waits."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor


class UncheckedStreams:
    """A simulation in which no stream waits: what a GPU launches early is launched early in a dry run too."""

    simulates_streams = True

    @property
    def current_stream(self) -> "UncheckedStream":
        return UncheckedStream()

    def new_stream(self) -> "UncheckedStream":
        return UncheckedStream()

    def collective(
        self, group: Any, event: Any, launch: Callable[[], Callable[[], object]], read: Tensor, written: Tensor
    ) -> Callable[[], object]:
        return launch()

    def read_on_host(self, tensors: Iterable[Tensor]) -> None: ...

    def raise_reports(self) -> None: ...

    def on_operation(self, function: Any, args: Any, kwargs: Any, output: Any) -> None: ...


class UncheckedStream:
    """A stream, and its own events, that never wait."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> "UncheckedStream":
        return self

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def as_current(self) -> AbstractContextManager[Any]:
        return nullcontext()
