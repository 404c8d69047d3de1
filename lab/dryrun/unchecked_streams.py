"""The streams of a dry run that imitates GPUs: what a GPU launches early is launched early, and nothing waits."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from torch import Tensor


class UncheckedStreams:
    """A `StreamSimulation` that is its own only stream, and the only event of that stream."""

    simulates_streams = True

    @property
    def current_stream(self) -> Self:
        return self

    def new_stream(self) -> Self:
        return self

    def record_event(self) -> Self:
        return self

    def collective(
        self, group: Any, event: Any, launch: Callable[[], Callable[[], object]], read: Tensor, written: Tensor
    ) -> Callable[[], object]:
        return launch()

    def as_current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def read_on_host(self, tensors: Iterable[Tensor]) -> None: ...

    def raise_reports(self) -> None: ...

    def on_operation(self, function: Any, args: Any, kwargs: Any, output: Any) -> None: ...
