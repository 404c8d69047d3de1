"""The records of a run, which its first rank keeps: metrics.jsonl, what sinks get of it, and the report at the end."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpt.builder.loss_guard import SpikeDetector
from gpt.builder.train_state import TrainState
from gpt.monitor.console import RunConsole, summary_table
from gpt.monitor.sinks import Sink, SinkThread, sink_openers
from gpt.run_folder.files import LOSS_PLOT, MetricsFile, each_step, read_steps, written_if_possible
from gpt.settings.option_names import in_option_names
from gpt.settings.schedule import rate_change
from gpt.settings.settings import Settings

logger = logging.getLogger(__name__)

SECONDS_TO_FINISH, SECONDS_TO_ABORT = 60.0, 10.0  # after a run that has succeeded, and one that has failed
DRAWN = "step", "tokens", "loss", "validation_loss"
SPIKE_FACTOR, NUM_AVERAGED = 2.0, 10  # a logged loss is a spike if it is twice the average of about ten losses


class Records:
    """The writer of the records of a run. All ranks may make the same calls; only those of the first one write."""

    def __init__(self, settings: Settings, is_first: bool):
        self._settings, self._is_first = settings, is_first
        self.folder = Path(settings.run.dir)
        self._metrics = MetricsFile(self.folder)
        self._sinks: list[SinkThread] = []
        self._spikes = SpikeDetector(SPIKE_FACTOR, decay=1 - 1 / NUM_AVERAGED, num_warmup=NUM_AVERAGED)
        self._summary: dict[str, Any] = {}
        self._failures: list[str] = []  # of saves, and of a checkpoint that a resume did not use
        self._drawn: list[dict[str, Any]] = []  # of all steps: the file is not read again at each plot
        self._last_plotted: dict[str, Any] = {}

    def _warn_if_rate_changed(self, last: Mapping[str, Any]) -> None:
        schedule, steps = self._settings.schedule, self._settings.train.steps
        if "lr" in last and (
            change := rate_change(schedule, self._settings.optimizer.lr, steps, last["step"], last["lr"])
        ):
            logger.warning("%s", change)

    @contextmanager
    def tracked(self, num_done: int) -> Iterator[None]:
        """Let the sinks follow the run inside this context; it continues after `num_done` steps.

        Warns if the settings give the last logged step another learning rate than it had.
        A run that is finished is not followed again.
        """
        if self._is_first and num_done < self._settings.train.steps:
            openers, history, last = sink_openers(self._settings, num_done), [], {}
            for last in each_step(self.folder):
                self._drawn.append(_drawn(last))
                history += [last] if openers else []
            self._warn_if_rate_changed(last)
            self._sinks = [SinkThread(name, open_sink, history) for name, open_sink in openers.items()]
            for reason in self._failures:
                self._alert("save", reason)
        try:
            yield
        except BaseException as error:
            self._alert("exit", f"the run has ended: {type(error).__name__}: {in_option_names(str(error))}")
            self._finish(exit_code=1, seconds=SECONDS_TO_ABORT)
            raise
        self._alert("exit", "the run has ended: all steps are done, or it was asked to stop")
        self._finish(exit_code=0, seconds=SECONDS_TO_FINISH)

    def append(self, record: dict[str, Any]) -> None:
        """Record a logged step, with an alert if its loss is a spike; plot the loss if it was evaluated."""
        if self._is_first:
            record |= {"failed_saves": len(self._failures)} if self._failures else {}
            self._metrics.append(record)
            self._call_sinks(lambda sink: sink.log(record))
            if spike := self._spike(record["loss"]):
                self._alert("spike", f"step {record['step']}: {spike}")
            self._drawn.append(_drawn(record))
            if "validation_loss" in record:
                self._plot()

    def roll_back(self, step: int) -> None:
        """Discard what was logged after `step`, with an alert."""
        self._metrics.roll_back(step)
        self._drawn = [record for record in self._drawn if record["step"] <= step]
        self._call_sinks(lambda sink: sink.roll_back(step))
        self._alert("spike", f"bad losses: the run was rolled back to step {step}")

    def on_save(self, checkpoint: Path) -> None:
        """Record the path of a checkpoint."""
        self._call_sinks(lambda sink: sink.log_checkpoint(checkpoint))

    def on_failed_save(self, reason: str) -> None:
        """Record that a checkpoint, a snapshot or an export of weights could not be written or read, with an alert."""
        self._failures.append(reason)
        self._alert("save", reason)

    def on_abort(self, reason: str) -> None:
        """Record why the run is aborted, and finish the sinks.

        A thread calls this just before it ends the process; the main thread may hang.
        """
        self._alert("stall", reason)
        self._finish(exit_code=1, seconds=SECONDS_TO_ABORT)

    def report(self, state: TrainState, console: RunConsole) -> None:
        """Show the summary, and plot the loss of all steps, those before a resume included."""
        self._metrics.close()
        records = read_steps(self.folder) if self._is_first else []
        if not records:
            return
        console.show(summary_table(state, self._settings.train, records))
        self._drawn = list(map(_drawn, records))
        if self._plot():
            console.say(f"{LOSS_PLOT} and all other files of the run are in {self.folder}")
        self._summary = records[-1]

    def _alert(self, title: str, text: str) -> None:
        self._call_sinks(lambda sink: sink.alert(title, text))

    def _finish(self, exit_code: int, seconds: float) -> None:
        summary = self._summary  # read now, because a thread runs the call below later
        self._call_sinks(lambda sink: sink.finish(summary, exit_code))
        for sink in self._sinks:
            sink.finish(seconds)

    def _call_sinks(self, call: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            sink.put(call)

    def _spike(self, loss: float) -> str | None:
        """Return a description of the loss if it is bad, else None."""
        if not self._spikes.judge(torch.tensor(loss, dtype=torch.float64)):
            return None
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return f"the loss is {loss:.4g}, {loss / self._spikes.mean.item():.1f} times its mean"

    def _plot(self) -> bool:
        """Plot the loss of all steps, unless the last plot shows them; return whether the file could be written."""
        plot = self.folder / LOSS_PLOT
        if self._drawn[-1] != self._last_plotted:
            with written_if_possible(plot):
                from gpt.monitor.plot import plot_loss  # imported here, because only the first rank needs matplotlib

                plot_loss(self._drawn, plot)
                self._last_plotted = self._drawn[-1]
        return plot.is_file()


def _drawn(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plot needs of a record."""
    return {name: record[name] for name in DRAWN if name in record}
