"""The records of a run, which its first rank keeps: metrics.jsonl, their tracking, and the report at the end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt.builder.train_state import TrainState
from gpt.monitor.console import RunConsole, summary_table
from gpt.monitor.tracking import Tracking, open_tracking
from gpt.run_folder.files import LOSS_PLOT, MetricsFile, read_steps, written_if_possible
from gpt.settings.schedule import rate_change
from gpt.settings.settings import Settings

logger = logging.getLogger(__name__)


class Records:
    """The writer of the records of a run. All ranks may make the same calls; only those of the first one write."""

    def __init__(self, settings: Settings, is_first: bool):
        self._settings, self._is_first = settings, is_first
        self.folder = Path(settings.run.dir)
        self._metrics, self._tracking = MetricsFile(self.folder), Tracking({})

    def warn_if_rate_changed(self, num_done: int) -> None:
        """Warn if the settings give the last logged step another learning rate than it had."""
        schedule, steps = self._settings.schedule, self._settings.train.steps
        records = read_steps(self.folder) if self._is_first else []
        if records and "lr" in records[-1] and num_done < steps:
            step, rate = records[-1]["step"], records[-1]["lr"]
            if change := rate_change(schedule, self._settings.optimizer.lr, steps, step, rate):
                logger.warning("%s", change)

    @contextmanager
    def tracked(self, num_done: int) -> Iterator[None]:
        """Track the run inside this context; it continues after `num_done` steps, which metrics.jsonl has.

        A run that is finished is not tracked again.
        """
        if num_done >= self._settings.train.steps:
            yield
            return
        self._tracking = open_tracking(self._settings, num_done, self._is_first)
        with self._tracking:
            yield

    def append(self, record: dict[str, Any]) -> None:
        """Record a logged step; plot the loss if it was evaluated."""
        if self._is_first:
            self._metrics.append(record)
            self._tracking.log(record)
            if "validation_loss" in record:
                self._plot(read_steps(self.folder))

    def roll_back(self, step: int) -> None:
        """Discard what was logged after `step`."""
        self._metrics.roll_back(step)
        self._tracking.roll_back(step)

    def on_save(self, checkpoint: Path) -> None:
        """Record the path of a checkpoint."""
        self._tracking.log_checkpoint(checkpoint)

    def on_abort(self, reason: str) -> None:
        """Record why the run is aborted; a thread calls this just before it ends the process."""
        self._tracking.on_abort(reason)

    def report(self, state: TrainState, console: RunConsole) -> None:
        """Show the summary, and plot the loss of all steps, those before a resume included."""
        self._metrics.close()
        records = read_steps(self.folder) if self._is_first else []
        if not records:
            return
        console.show(summary_table(state, self._settings.train, records))
        if self._plot(records):
            console.say(f"{LOSS_PLOT} and all other files of the run are in {self.folder}")
        self._tracking.summary = records[-1]

    def _plot(self, records: list[dict[str, Any]]) -> bool:
        """Plot the loss of all steps; return whether the file could be written."""
        plot = self.folder / LOSS_PLOT
        with written_if_possible(plot):
            from gpt.monitor.plot import plot_loss  # imported here, because only the first rank needs matplotlib

            plot_loss(records, plot)
        return plot.is_file()
