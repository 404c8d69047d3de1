"""The streams of a dry run that imitates GPUs: what a GPU launches early is launched early, and nothing waits."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self


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
        self, group: Any, event: Any, launch: Callable[[], Callable[[], object]], read: Any, written: Any
    ) -> Callable[[], object]:
        return launch()

    def as_current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def query(self) -> bool:
        return True

    def ignore(self, *_arguments: Any) -> None: ...

    synchronize = wait_stream = wait_event = read_on_host = raise_reports = on_operation = ignore
