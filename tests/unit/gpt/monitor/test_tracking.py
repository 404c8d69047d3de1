"""Sinks get all that was logged, in order, and cost the training nothing, whatever becomes of them."""

import math
import threading
import time
from pathlib import Path

import pytest

from gpt.monitor import tracking
from gpt.monitor.tensorboard_sink import TensorboardRun
from gpt.monitor.tracking import Tracking
from gpt.settings import RunSettings
from parallel.errors import ConfigError


class Notes:
    """A sink that remembers what it was told."""

    def __init__(self):
        self.told = []

    def log(self, record):
        self.told.append(record["step"])

    def roll_back(self, step):
        self.told.append(("roll_back", step))

    def alert(self, title, text):
        self.told.append((title, text))

    def refer_to(self, checkpoint):
        self.told.append(checkpoint.name)

    def finish(self, summary, exit_code):
        self.told.append(("finish", dict(summary), exit_code))


def records(*losses: float) -> list[dict]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]


def test_a_sink_gets_the_history_then_every_event_in_order():
    notes = Notes()
    with Tracking({"notes": lambda: notes}, history=records(3.0, 2.0)) as watched:
        watched.log({"step": 3, "loss": 1.5})
        watched.refer_to(Path("run/checkpoints/step-00000003"))
        watched.roll_back(2)
        watched.summary = {"loss": 1.5}
    rolled_back = ("spike", "bad losses: the run was rolled back to step 2")
    ended = ("exit", "the run has ended: all steps are done, or it was asked to stop")
    expected = [1, 2, 3, "step-00000003", ("roll_back", 2), rolled_back, ended, ("finish", {"loss": 1.5}, 0)]
    assert notes.told == expected


def test_an_error_is_told_with_its_reason():
    notes = Notes()
    with pytest.raises(ConfigError), Tracking({"notes": lambda: notes}):
        raise ConfigError("no disk")
    assert notes.told == [("exit", "the run has ended: ConfigError: no disk"), ("finish", {}, 1)]


@pytest.mark.parametrize(("loss", "alert"), [(2.1, "2.1, 2.1 times its mean"), (math.nan, "nan"), (1.9, None)])
def test_a_loss_that_is_not_finite_or_far_above_the_usual_is_an_alert(loss, alert):
    notes = Notes()
    with Tracking({"notes": lambda: notes}) as watched:
        for record in records(*[1.0] * 10, loss):
            watched.log(record)
    expected = [("spike", f"step 11: the loss is {alert}")] if alert else []
    assert notes.told[11:-2] == expected


def test_a_sink_that_fails_is_left_out_and_another_goes_on(caplog):
    def fails():
        raise OSError("no network")

    notes = Notes()
    with Tracking({"lost": fails, "notes": lambda: notes}) as watched:
        watched.log({"step": 1, "loss": 1.0})
    assert notes.told[0] == 1
    assert [record.message for record in caplog.records] == [
        "tracking by lost failed (no network) and is off from here on; metrics.jsonl has all of it"
    ]


def test_a_sink_that_hangs_holds_nothing_up_and_is_not_waited_for_long(monkeypatch, caplog):
    monkeypatch.setattr(tracking, "SECONDS_TO_FINISH", 0.1)
    never = threading.Event()
    with Tracking({"hung": lambda: never.wait()}) as watched:  # type: ignore[arg-type, return-value]
        for record in records(*[1.0] * 1000):
            watched.log(record)
    assert "was not done 0.1 s after the end" in caplog.text
    never.set()


def test_last_words_are_told_before_a_process_ends():
    notes = Notes()
    Tracking({"notes": lambda: notes}).on_abort("rank 1 does not answer")
    assert notes.told == [("stall", "rank 1 does not answer"), ("finish", {}, 1)]


def test_tensorboard_is_asked_for_only_where_its_package_is(monkeypatch):
    monkeypatch.setattr("gpt.settings.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run.tensorboard=true needs a package; pip install tensorboard"):
        RunSettings(tensorboard=True)


def test_event_files_hold_every_step_once_after_a_kill_and_a_way_back(tmp_path):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed = TensorboardRun(tmp_path)
    for record in records(3.0, 2.0, 9.0):
        killed.log(record)
    time.sleep(1.1)  # event files are ordered by the second they were begun in
    resumed = TensorboardRun(tmp_path)
    for record in records(3.0, 2.0, 1.0):
        resumed.log(record)
    time.sleep(1.1)
    resumed.roll_back(2)
    resumed.log({"step": 3, "loss": 0.5, "grad_norm/blocks.0": 1.0})
    resumed.finish({}, 0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 2.0), (3, 0.5)]
    assert [event.step for event in events.Scalars("grad_norm/blocks.0")] == [3]
