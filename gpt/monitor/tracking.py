"""Where a run is watched: what metrics.jsonl says, alerts and checkpoints, handed on to sinks.

    training ---- queue ----> a thread ----> W&B            one queue and thread a sink: what hangs, or fails, costs
             `--- queue ----> a thread ----> TensorBoard    its sink, never the training, nor a second of it

A sink that is opened gets what metrics.jsonl holds already: after a resume, and whatever a kill has taken from it.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, Protocol, Self

import torch

from gpt.loss_guard import SpikeDetector
from gpt.monitor.tensorboard_sink import TensorboardRun
from gpt.monitor.wandb_sink import WandbRun
from gpt.run_folder.files import read_steps
from gpt.settings import Settings

logger = logging.getLogger(__name__)

MAX_WAITING = 100_000  # actions that a sink may be behind
SECONDS_TO_FINISH, SECONDS_FOR_LAST_WORDS = 60.0, 10.0
SPIKE_FACTOR, NUM_FOR_A_MEAN = 2.0, 10  # a logged loss is a spike if it is so many times the mean of about 10


class Sink(Protocol):
    """One place that shows a run. Every call may fail and may take long; none comes before the one before has ended."""

    def log(self, record: Mapping[str, Any]) -> None:
        """A logged step; those that the sink has already, it leaves out."""

    def roll_back(self, step: int) -> None:
        """What was logged after `step` counts no more, and comes again."""

    def alert(self, title: str, text: str) -> None: ...

    def refer_to(self, checkpoint: Path) -> None:
        """Note where a checkpoint lies; nothing of it is copied."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None: ...


class Tracking:
    """Of one run, by its first rank; `openers` are its sinks by name, `history` the steps that were logged before."""

    def __init__(self, openers: Mapping[str, Callable[[], Sink]], history: Sequence[Mapping[str, Any]] = ()):
        self._feeds = [Feed(name, open_sink, history) for name, open_sink in openers.items()]
        self._spikes = SpikeDetector(SPIKE_FACTOR, memory=1 - 1 / NUM_FOR_A_MEAN, num_for_a_mean=NUM_FOR_A_MEAN)
        self.summary: Mapping[str, Any] = {}

    def log(self, record: Mapping[str, Any]) -> None:
        self._to_all(lambda sink: sink.log(record))
        if what := self._spike(record["loss"]):
            self.alert("spike", f"step {record['step']}: {what}")

    def roll_back(self, step: int) -> None:
        self._to_all(lambda sink: sink.roll_back(step))
        self.alert("spike", f"bad losses: the run was rolled back to step {step}")

    def alert(self, title: str, text: str) -> None:
        self._to_all(lambda sink: sink.alert(title, text))

    def refer_to(self, checkpoint: Path) -> None:
        self._to_all(lambda sink: sink.refer_to(checkpoint))

    def on_abort(self, text: str) -> None:
        """From a thread of a process that is about to end whatever its main thread does."""
        self.alert("stall", text)
        self._finish(exit_code=1, seconds=SECONDS_FOR_LAST_WORDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self.alert("exit", "the run has ended: all steps are done, or it was asked to stop")
            self._finish(exit_code=0, seconds=SECONDS_TO_FINISH)
        else:
            self.alert("exit", f"the run has ended: {type(error).__name__}: {error}")
            self._finish(exit_code=1, seconds=SECONDS_FOR_LAST_WORDS)

    def _finish(self, exit_code: int, seconds: float) -> None:
        summary = self.summary
        self._to_all(lambda sink: sink.finish(summary, exit_code))
        for feed in self._feeds:
            feed.end(seconds)

    def _to_all(self, action: Callable[[Sink], None]) -> None:
        for feed in self._feeds:
            feed.put(action)

    def _spike(self, loss: float) -> str | None:
        if not self._spikes.judge(torch.tensor(loss, dtype=torch.float64)):
            return None
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return f"the loss is {loss:.4g}, {loss / self._spikes.mean.item():.1f} times its mean"


class Feed:
    """The way to one sink, which is opened, fed and closed in a thread of its own."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], history: Sequence[Mapping[str, Any]]):
        self._name, self._open, self._history = name, open_sink, history
        self._actions: Queue[Callable[[Sink], None] | None] = Queue(MAX_WAITING)
        self._is_off = Event()
        Thread(target=self._run, name=f"tracking by {name}", daemon=True).start()

    def put(self, action: Callable[[Sink], None]) -> None:
        try:
            if not self._is_off.is_set():
                self._actions.put_nowait(action)
        except Full:
            self._give_up(f"is {MAX_WAITING} steps behind")

    def end(self, seconds: float) -> None:
        """Wait until all is done, but no longer than this."""
        try:
            self._actions.put_nowait(None)
        except Full:
            return
        if not self._is_off.wait(seconds):
            self._give_up(f"was not done {seconds:g} s after the end")

    def _run(self) -> None:
        try:
            sink = self._open()
            for record in self._history:
                sink.log(record)
            while action := self._actions.get():
                action(sink)
            self._is_off.set()
        except Exception as error:  # a lost network, a full disk, a mistake of the sink's own
            self._give_up(f"failed ({error})")

    def _give_up(self, reason: str) -> None:
        if not self._is_off.is_set():
            self._is_off.set()
            logger.warning("tracking by %s %s and is off from here on; metrics.jsonl has all of it", self._name, reason)


def open_tracking(settings: Settings, last_step: int, is_first: bool) -> Tracking:
    """The sinks that the settings name, for a run that goes on after `last_step`; only the first rank has any."""
    openers: dict[str, Callable[[], Sink]] = {}
    if settings.run.tensorboard:
        openers["TensorBoard"] = lambda: TensorboardRun(Path(settings.run.dir))
    if settings.wandb.mode != "disabled":
        is_same_run = last_step > 0 and settings.checkpoint.resume == "auto"
        openers["Weights & Biases"] = lambda: WandbRun(settings, is_same_run)
    return Tracking(openers, read_steps(Path(settings.run.dir))) if is_first else Tracking({})
