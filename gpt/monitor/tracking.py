"""Tracking of a run: logged metrics, alerts and paths of checkpoints are sent to sinks, such as W&B.

    training ---- queue ----> a thread ----> W&B            one queue and thread per sink: a sink that hangs or fails
             `--- queue ----> a thread ----> TensorBoard    is switched off, and never delays or stops the training

A sink first gets all steps of metrics.jsonl, so it is complete even if the run resumes, or was killed and lost data.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, Protocol, Self

import torch
import yaml

from gpt.builder.loss_guard import SpikeDetector
from gpt.monitor.tensorboard_sink import TensorboardRun
from gpt.monitor.wandb_sink import WandbRun
from gpt.run_folder.files import read_steps
from gpt.settings.option_names import in_option_names
from gpt.settings.settings import Settings

logger = logging.getLogger(__name__)

MAX_PENDING = 100_000  # calls in the queue of a sink, above which it is switched off
SECONDS_TO_FINISH, SECONDS_TO_ABORT = 60.0, 10.0  # after a run that has succeeded, and one that has failed
SPIKE_FACTOR, NUM_AVERAGED = 2.0, 10  # a logged loss is a spike if it is twice the average of about ten losses


class Sink(Protocol):
    """A service that displays a run. Its methods are called one after the other; each may take long or raise."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Record a logged step, unless the sink has it already."""

    def roll_back(self, step: int) -> None:
        """Discard what was logged after `step`; those steps will be logged again."""

    def alert(self, title: str, text: str) -> None:
        """Notify people who follow the run."""

    def log_checkpoint(self, checkpoint: Path) -> None:
        """Record the path of a checkpoint; its files are not copied."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Record how the run ended, and close the sink."""


class Tracking:
    """The tracking of one run by its first rank.

    `sink_openers` are functions that open the sinks, by the sinks' names. `history` are the steps that were logged
    before this process started. When the context is left, the sinks record `summary` and are closed.
    """

    def __init__(self, sink_openers: Mapping[str, Callable[[], Sink]], history: Sequence[Mapping[str, Any]] = ()):
        self._threads = [SinkThread(name, open_sink, history) for name, open_sink in sink_openers.items()]
        self._spikes = SpikeDetector(SPIKE_FACTOR, decay=1 - 1 / NUM_AVERAGED, num_warmup=NUM_AVERAGED)
        self.summary: Mapping[str, Any] = {}

    def log(self, record: Mapping[str, Any]) -> None:
        """Record a logged step, with an alert if its loss is a spike."""
        self._call_all(lambda sink: sink.log(record))
        if spike := self._spike(record["loss"]):
            self.alert("spike", f"step {record['step']}: {spike}")

    def roll_back(self, step: int) -> None:
        """Discard what was logged after `step`, with an alert."""
        self._call_all(lambda sink: sink.roll_back(step))
        self.alert("spike", f"bad losses: the run was rolled back to step {step}")

    def alert(self, title: str, text: str) -> None:
        """Notify people who follow the run."""
        self._call_all(lambda sink: sink.alert(title, text))

    def log_checkpoint(self, checkpoint: Path) -> None:
        """Record the path of a checkpoint."""
        self._call_all(lambda sink: sink.log_checkpoint(checkpoint))

    def on_abort(self, text: str) -> None:
        """Record why the run is aborted, and finish the sinks.

        A thread calls this just before it ends the process; the main thread may hang.
        """
        self.alert("stall", text)
        self._finish(exit_code=1, seconds=SECONDS_TO_ABORT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self.alert("exit", "the run has ended: all steps are done, or it was asked to stop")
            self._finish(exit_code=0, seconds=SECONDS_TO_FINISH)
        else:
            self.alert("exit", f"the run has ended: {type(error).__name__}: {in_option_names(str(error))}")
            self._finish(exit_code=1, seconds=SECONDS_TO_ABORT)

    def _finish(self, exit_code: int, seconds: float) -> None:
        summary = self.summary  # read now, because a thread runs the call below later
        self._call_all(lambda sink: sink.finish(summary, exit_code))
        for thread in self._threads:
            thread.finish(seconds)

    def _call_all(self, call: Callable[[Sink], None]) -> None:
        for thread in self._threads:
            thread.put(call)

    def _spike(self, loss: float) -> str | None:
        """Return a description of the loss if it is bad, else None."""
        if not self._spikes.judge(torch.tensor(loss, dtype=torch.float64)):
            return None
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return f"the loss is {loss:.4g}, {loss / self._spikes.mean.item():.1f} times its mean"


class SinkThread:
    """A thread that opens one sink and makes all calls to it, in order."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], history: Sequence[Mapping[str, Any]]):
        self._name, self._open, self._history = name, open_sink, history
        self._calls: Queue[Callable[[Sink], None] | None] = Queue(MAX_PENDING)
        self._has_ended = Event()
        Thread(target=self._run, name=f"tracking by {name}", daemon=True).start()

    def put(self, call: Callable[[Sink], None]) -> None:
        """Queue a call to the sink, unless it is switched off. Never blocks."""
        try:
            if not self._has_ended.is_set():
                self._calls.put_nowait(call)
        except Full:
            self._switch_off(f"is {MAX_PENDING} calls behind")

    def finish(self, seconds: float) -> None:
        """Wait until all queued calls are done, for at most `seconds`."""
        try:
            self._calls.put_nowait(None)  # ends the thread's loop after the calls before it
        except Full:
            return
        if not self._has_ended.wait(seconds):
            self._switch_off(f"has not finished within {seconds:g} s")

    def _run(self) -> None:
        try:
            sink = self._open()
            for record in self._history:
                sink.log(record)
            while call := self._calls.get():
                call(sink)
            self._has_ended.set()
        except Exception as error:  # such as a lost network, a full disk, or a bug of the sink
            self._switch_off(f"failed ({error})")

    def _switch_off(self, reason: str) -> None:
        if not self._has_ended.is_set():
            self._has_ended.set()
            logger.warning(
                "tracking by %s %s and is switched off; metrics.jsonl still gets every step", self._name, reason
            )


def open_tracking(settings: Settings, last_step: int, is_first: bool) -> Tracking:
    """Return the tracking of a run that continues after `last_step`. On ranks other than the first, it has no sinks."""
    run_dir, config = Path(settings.run.dir), yaml.safe_load(settings.to_yaml())
    openers: dict[str, Callable[[], Sink]] = {}
    if settings.run.tensorboard:
        openers["TensorBoard"] = lambda: TensorboardRun(run_dir)
    if settings.wandb.mode != "disabled":
        is_same_run = last_step > 0 and settings.checkpoint.resume == "auto"
        openers["Weights & Biases"] = lambda: WandbRun(settings.wandb, run_dir, config, is_same_run)
    return Tracking(openers, read_steps(run_dir)) if is_first else Tracking({})
