"""The watch over a run: a signal stops all ranks after the same step, and a hang ends them with a report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt.builder.train_state import TrainState
from gpt.monitor.hang import write_hang_report
from gpt.settings.run import RunSettings
from parallel.stopping import Stopping
from parallel.store import shared_store
from parallel.watchdog import Watchdog
from parallel.world import World


class Watch:
    """The watch of one rank; `on_abort` is called with the reason just before a rank is ended, in another thread."""

    def __init__(self, settings: RunSettings, world: World, state: TrainState, on_abort: Callable[[str], None]):
        store, log = shared_store(), state.mesh.log

        def on_hang(reason: str) -> None:  # the report first: `on_abort` may take seconds
            try:
                write_hang_report(Path(settings.dir), world.rank, log, reason)
            finally:
                on_abort(reason)

        self._stopping = Stopping(store, world.rank, world.size, on_abort)
        self._watchdog = Watchdog(store, world.rank, world.size, log, settings.hang_seconds, on_hang)
        if settings.hang_seconds:
            log.follow(state.device)
        self.has_stopped = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the run inside this context, in which the first signal asks all ranks to stop."""
        with self._stopping.handling_signals(), self._watchdog.running():
            yield

    def may_begin(self, step: int) -> bool:
        """Return False if a signal has made the step before the last one. Blocks while ranks agree."""
        self.has_stopped = not self._stopping.may_begin(step)
        return not self.has_stopped

    def beat(self) -> None:
        """Record progress other than a collective. May be called from any thread."""
        self._watchdog.beat()
