"""Sinks get all logged steps in order, and a sink that fails or hangs does not affect the training."""

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpt.monitor import tracking
from gpt.monitor.tensorboard_sink import TensorboardRun
from gpt.monitor.tracking import Tracking
from gpt.settings.parser import parse_settings
from gpt.settings.run import RunSettings
from parallel.errors import ConfigError
from tests.unit.gpt.builder.test_train_state import BASE

SAMPLES = [{"prompt": "def", "text": "def f():\n    pass"}]


class RecordingSink:
    """A sink that records the calls to it."""

    def __init__(self):
        self.calls = []

    def log(self, record):
        self.calls.append(record["step"])

    def roll_back(self, step):
        self.calls.append(("roll_back", step))

    def alert(self, title, text):
        self.calls.append((title, text))

    def log_checkpoint(self, checkpoint):
        self.calls.append(checkpoint.name)

    def finish(self, summary, exit_code):
        self.calls.append(("finish", dict(summary), exit_code))


def records(*losses: float) -> list[dict]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]


def test_a_sink_gets_the_history_then_every_event_in_order():
    sink = RecordingSink()
    with Tracking({"recording": lambda: sink}, history=records(3.0, 2.0)) as run_tracking:
        run_tracking.log({"step": 3, "loss": 1.5})
        run_tracking.log_checkpoint(Path("run/checkpoints/step-00000003"))
        run_tracking.roll_back(2)
        run_tracking.summary = {"loss": 1.5}
    rolled_back = ("spike", "bad losses: the run was rolled back to step 2")
    ended = ("exit", "the run has ended: all steps are done, or it was asked to stop")
    expected = [1, 2, 3, "step-00000003", ("roll_back", 2), rolled_back, ended, ("finish", {"loss": 1.5}, 0)]
    assert sink.calls == expected


def test_an_error_is_reported_with_its_reason():
    sink = RecordingSink()
    with pytest.raises(ConfigError), Tracking({"recording": lambda: sink}):
        raise ConfigError("no disk for ZeroConfig.stage=2")
    assert sink.calls == [("exit", "the run has ended: ConfigError: no disk for zero.stage=2"), ("finish", {}, 1)]


@pytest.mark.parametrize(("loss", "alert"), [(2.1, "2.1, 2.1 times its mean"), (math.nan, "nan"), (1.9, None)])
def test_a_loss_that_is_not_finite_or_far_above_the_usual_is_an_alert(loss, alert):
    sink = RecordingSink()
    with Tracking({"recording": lambda: sink}) as run_tracking:
        for record in records(*[1.0] * 10, loss):
            run_tracking.log(record)
    expected = [("spike", f"step 11: the loss is {alert}")] if alert else []
    assert sink.calls[11:-2] == expected


def test_a_sink_that_fails_is_switched_off_and_another_continues(caplog):
    def fails():
        raise OSError("no network")

    sink = RecordingSink()
    with Tracking({"lost": fails, "recording": lambda: sink}) as run_tracking:
        run_tracking.log({"step": 1, "loss": 1.0})
    assert sink.calls[0] == 1
    assert [record.message for record in caplog.records] == [
        "tracking by lost failed (no network) and is switched off; metrics.jsonl still gets every step"
    ]


@pytest.fixture
def log_to_hanging_sink(monkeypatch) -> Iterator[Callable[[int], None]]:
    """Return what logs a number of steps to a sink that does not open before the test ends."""
    monkeypatch.setattr(tracking, "SECONDS_TO_FINISH", 0.1)
    end = threading.Event()

    def log(num_steps: int) -> None:
        with Tracking({"hung": lambda: end.wait()}) as run_tracking:  # type: ignore[arg-type, return-value]
            for record in records(*[1.0] * num_steps):
                run_tracking.log(record)

    yield log
    end.set()


def test_a_sink_that_hangs_delays_nothing_and_is_waited_for_briefly(log_to_hanging_sink, caplog):
    log_to_hanging_sink(1000)
    assert "has not finished within 0.1 s" in caplog.text


def test_a_sink_that_falls_behind_is_switched_off(log_to_hanging_sink, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "MAX_PENDING", 3)
    log_to_hanging_sink(10)
    assert "tracking by hung is 3 calls behind" in caplog.text
    assert len(caplog.records) == 1


def test_an_abort_is_reported_before_the_process_ends():
    sink = RecordingSink()
    Tracking({"recording": lambda: sink}).on_abort("rank 1 does not answer")
    assert sink.calls == [("stall", "rank 1 does not answer"), ("finish", {}, 1)]


@pytest.mark.parametrize(
    ("last_step", "resume", "is_same_run"),
    [(0, "auto", False), (1, "auto", True), (9, "never", False)],
)
def test_a_run_that_continues_after_a_checkpoint_is_the_same_run_of_wandb(
    last_step, resume, is_same_run, tmp_path, monkeypatch
):
    opened: list[tuple] = []
    monkeypatch.setattr(tracking, "WandbRun", lambda *arguments: opened.append(arguments) or RecordingSink())
    options = ["--wandb.mode=offline", f"--checkpoint.resume={resume}", f"--run.dir={tmp_path}"]
    settings = parse_settings([f"--config={BASE}", *options])
    for is_first in (True, False):
        with tracking.open_tracking(settings, last_step, is_first):
            pass
    ((wandb, run_dir, config, found),) = opened
    assert (wandb, run_dir, found) == (settings.wandb, tmp_path, is_same_run)
    assert config["checkpoint"]["resume"] == resume


def test_tensorboard_needs_its_package(monkeypatch):
    monkeypatch.setattr("gpt.settings.run.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"RunSettings.tensorboard=true needs a package; pip install tensorboard"):
        RunSettings(tensorboard=True)


@pytest.fixture
def read_events(tmp_path) -> Callable[[], Any]:
    """Return what reads the event files of the run in `tmp_path`."""
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return lambda: EventAccumulator(str(tmp_path / "tensorboard")).Reload()


def test_event_files_hold_every_step_once_after_a_kill_and_a_roll_back(tmp_path, read_events, monkeypatch):
    # Event files are ordered by the second in which they were opened: each look at this clock is in another one.
    clock = SimpleNamespace(time=itertools.count(10**9).__next__)
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    killed = TensorboardRun(tmp_path)
    for record in records(3.0, 2.0, 9.0):
        killed.log(record)
    resumed = TensorboardRun(tmp_path)
    for record in records(3.0, 2.0, 1.0):
        resumed.log(record)
    resumed.roll_back(2)
    resumed.log({"step": 3, "loss": 0.5, "grad_norm/blocks.0": 1.0, "samples": SAMPLES})
    resumed.finish({}, 0)
    events = read_events()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 2.0), (3, 0.5)]
    assert [event.step for event in events.Scalars("grad_norm/blocks.0")] == [3]
    (text,) = events.Tensors("sample/0/text_summary")
    assert (text.step, text.tensor_proto.string_val) == (3, [b"    def f():\n        pass"])


def test_a_thread_of_tensorboard_that_fails_prints_no_traceback_and_any_other_does(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    tensorboard_run = TensorboardRun(tmp_path)
    of_tensorboard, other = (SimpleNamespace(thread=SimpleNamespace(**found)) for found in ({"exception": None}, {}))
    threading.excepthook(of_tensorboard)
    threading.excepthook(other)
    tensorboard_run.finish({}, 0)
    assert printed == [other]


def test_event_files_hold_alerts_and_the_places_of_checkpoints(tmp_path, read_events):
    tensorboard_run = TensorboardRun(tmp_path)
    tensorboard_run.log({"step": 7, "loss": 1.0})
    tensorboard_run.alert("spike", "the loss is nan")
    tensorboard_run.log_checkpoint(tmp_path / "step-00000007")
    tensorboard_run.finish({}, 0)
    events = read_events()
    for tag, text in (("alert/spike", "the loss is nan"), ("checkpoint", str(tmp_path / "step-00000007"))):
        (event,) = events.Tensors(f"{tag}/text_summary")
        assert (event.step, event.tensor_proto.string_val) == (7, [text.encode()])
