"""Sinks get all logged steps in order, and a sink that fails or hangs does not affect the training."""

import itertools
import math
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from gpt.monitor import records as monitor_records
from gpt.monitor import sinks
from gpt.monitor.records import Records
from gpt.monitor.sinks import TensorboardRun, WandbRun
from gpt.run_folder.files import append_records, read_steps
from gpt.settings.parser import parse_settings
from gpt.settings.run import RunSettings, WandbSettings
from parallel.validation.errors import ConfigError
from tests.unit.gpt.builder.test_train_state import BASE
from tests.unit.gpt.run_folder.test_files import record

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
    return [record(step, loss=loss) for step, loss in enumerate(losses, start=1)]


@contextmanager
def tracked(
    folder: Path, history: Sequence[dict[str, Any]] = (), failure: str = "", **openers: Callable[[], Any]
) -> Iterator[Records]:
    """Yield the records of a run that goes on after its history, and a failure of its resume; these sinks follow it."""
    if history:
        append_records(folder, list(history))
    settings = parse_settings([f"--config={BASE}", f"--run.dir={folder}"])
    with mock.patch.object(monitor_records, "sink_openers", return_value=openers):
        followed = Records(settings, is_first=True)
        if failure:
            followed.on_failed_save(failure)
        with followed.tracked(len(history)):
            yield followed


def test_a_sink_gets_the_history_then_every_event_in_order(tmp_path):
    sink = RecordingSink()
    with tracked(tmp_path, records(3.0, 2.0), recording=lambda: sink) as followed:
        followed.append({"step": 3, "loss": 1.5})
        followed.on_save(Path("run/checkpoints/step-00000003"))
        followed.roll_back(2)
    rolled_back = ("spike", "bad losses: the run was rolled back to step 2")
    ended = ("exit", "the run has ended: all steps are done, or it was asked to stop")
    expected = [1, 2, 3, "step-00000003", ("roll_back", 2), rolled_back, ended, ("finish", {}, 0)]
    assert sink.calls == expected


def test_an_error_is_reported_with_its_reason(tmp_path):
    sink = RecordingSink()
    with pytest.raises(ConfigError), tracked(tmp_path, recording=lambda: sink):
        raise ConfigError("no disk for ZeroConfig.stage=2")
    assert sink.calls == [("exit", "the run has ended: ConfigError: no disk for zero.stage=2"), ("finish", {}, 1)]


@pytest.mark.parametrize(("loss", "alert"), [(2.1, "2.1, 2.1 times its mean"), (math.nan, "nan"), (1.9, None)])
def test_a_loss_that_is_not_finite_or_far_above_the_usual_is_an_alert(loss, alert, tmp_path):
    sink = RecordingSink()
    with tracked(tmp_path, recording=lambda: sink) as followed:
        for step in records(*[1.0] * 10, loss):
            followed.append(step)
    expected = [("spike", f"step 11: the loss is {alert}")] if alert else []
    assert sink.calls[11:-2] == expected


def test_a_save_that_fails_is_an_alert_and_counted_in_the_records_that_follow(tmp_path):
    sink = RecordingSink()
    with tracked(tmp_path, failure="one is damaged", recording=lambda: sink) as followed:
        for step in records(1.0, 1.0, 1.0):
            followed.append(step)
            if step["step"] < 3:
                followed.on_failed_save(f"checkpoint of step {step['step']} cannot be written")
    texts = [f"checkpoint of step {step} cannot be written" for step in (1, 2)]
    assert sink.calls[:6] == [("save", "one is damaged"), 1, ("save", texts[0]), 2, ("save", texts[1]), 3]
    assert [step.get("failed_saves") for step in read_steps(tmp_path)] == [1, 2, 3]


def test_an_evaluation_draws_all_steps_without_reading_them_again(tmp_path):
    with tracked(tmp_path, records(3.0, 2.0)) as followed, mock.patch("gpt.monitor.plot.plot_loss") as plot:
        followed.append({"step": 3, "loss": 9.0})
        followed.roll_back(2)
        (tmp_path / "metrics.jsonl").unlink()
        followed.append({"step": 3, "loss": 1.0, "validation_loss": 1.5})
    drawn, _ = plot.call_args.args
    assert [(step["step"], step["loss"], step.get("validation_loss")) for step in drawn] == [
        (1, 3.0, None),
        (2, 2.0, None),
        (3, 1.0, 1.5),
    ]


def test_a_sink_that_fails_is_switched_off_and_another_continues(tmp_path, caplog):
    def fails():
        raise OSError("no network")

    sink = RecordingSink()
    with tracked(tmp_path, lost=fails, recording=lambda: sink) as followed:
        followed.append({"step": 1, "loss": 1.0})
    assert sink.calls[0] == 1
    assert caplog.messages == [
        "tracking by lost failed (no network) and is switched off; metrics.jsonl still gets every step"
    ]


@pytest.fixture
def log_to_hanging_sink(tmp_path, monkeypatch) -> Iterator[Callable[[int], None]]:
    """Return what logs a number of steps to a sink that does not open before the test ends."""
    monkeypatch.setattr(monitor_records, "SECONDS_TO_FINISH", 0.1)
    end = threading.Event()

    def log(num_steps: int) -> None:
        with tracked(tmp_path, hung=lambda: end.wait()) as followed:
            for step in records(*[1.0] * num_steps):
                followed.append(step)

    yield log
    end.set()


def test_a_sink_that_hangs_delays_nothing_and_is_waited_for_briefly(log_to_hanging_sink, caplog):
    log_to_hanging_sink(1000)
    assert "has not finished within 0.1 s" in caplog.text


def test_a_sink_that_falls_behind_is_switched_off(log_to_hanging_sink, monkeypatch, caplog):
    monkeypatch.setattr(sinks, "MAX_PENDING", 3)
    log_to_hanging_sink(10)
    assert "tracking by hung is 3 calls behind" in caplog.text
    assert len(caplog.records) == 1


def test_an_abort_is_reported_before_the_process_ends(tmp_path):
    sink = RecordingSink()
    with tracked(tmp_path, recording=lambda: sink) as followed:
        followed.on_abort("rank 1 does not answer")
        assert sink.calls == [("stall", "rank 1 does not answer"), ("finish", {}, 1)]


@pytest.mark.parametrize(
    ("last_step", "resume", "is_same_run"), [(0, "auto", False), (1, "auto", True), (9, "never", False)]
)
def test_a_run_that_continues_after_a_checkpoint_is_the_same_run_of_wandb(last_step, resume, is_same_run, tmp_path):
    options = ["--wandb.mode=offline", f"--checkpoint.resume={resume}", f"--run.dir={tmp_path}"]
    settings = parse_settings([f"--config={BASE}", *options])
    with mock.patch.object(sinks, "WandbRun") as opened:
        for open_sink in sinks.sink_openers(settings, last_step).values():
            open_sink()
    ((wandb, run_dir, config, found),) = (call.args for call in opened.call_args_list)
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
    killed = TensorboardRun(tmp_path, 0)
    for step in records(3.0, 2.0, 9.0):
        killed.log(step)
    resumed = TensorboardRun(tmp_path, 2)
    for step in records(9.0, 9.0, 1.0):  # it has the first two
        resumed.log(step)
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
    tensorboard_run = TensorboardRun(tmp_path, 0)
    of_tensorboard, other = (SimpleNamespace(thread=SimpleNamespace(**found)) for found in ({"exception": None}, {}))
    threading.excepthook(of_tensorboard)
    threading.excepthook(other)
    tensorboard_run.finish({}, 0)
    assert printed == [other]


def test_event_files_hold_alerts_and_the_places_of_checkpoints(tmp_path, read_events):
    tensorboard_run = TensorboardRun(tmp_path, 0)
    tensorboard_run.log({"step": 7, "loss": 1.0})
    tensorboard_run.alert("spike", "the loss is nan")
    tensorboard_run.log_checkpoint(tmp_path / "step-00000007")
    tensorboard_run.finish({}, 0)
    events = read_events()
    for tag, text in (("alert/spike", "the loss is nan"), ("checkpoint", str(tmp_path / "step-00000007"))):
        (event,) = events.Tensors(f"{tag}/text_summary")
        assert (event.step, event.tensor_proto.string_val) == (7, [text.encode()])


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def version_in(folder: Path) -> str:
    with mock.patch.object(sinks, "__file__", str(folder / "sinks.py")):
        return sinks.code_version()


def test_the_version_of_the_code_is_its_commit_and_says_if_files_differ(tmp_path: Path):
    assert version_in(tmp_path) == "unknown"
    git(tmp_path, "init", "-q")
    assert version_in(tmp_path) == "unknown", "there is no commit yet"
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "first")
    assert version_in(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "a").write_text("2")
    assert version_in(tmp_path) == git(tmp_path, "rev-parse", "HEAD") + "+changes"


def sink_of(folder: Path, *starts: object) -> tuple[WandbRun, list[str]]:
    """Return a sink whose attempts to start a run end so, and the modes of these attempts."""
    with mock.patch("wandb.init", side_effect=starts) as init, mock.patch("wandb.teardown"):
        sink = WandbRun(WandbSettings(mode="online"), folder, {}, is_same_run=False)
    return sink, [call.kwargs["mode"] for call in init.call_args_list]


def test_a_run_is_logged_offline_if_the_server_cannot_be_reached(tmp_path: Path):
    from wandb.errors import CommError  # here: it takes seconds, and every process of a suite collects this file

    assert sink_of(tmp_path, CommError("no network"), mock.Mock(id="abc"))[1] == ["online", "offline"]


def test_a_checkpoint_that_is_deleted_before_it_is_logged_is_left_out(tmp_path: Path):
    sink, _ = sink_of(tmp_path, run := mock.Mock(id="abc"))
    kept, deleted = tmp_path / "step-00000004", tmp_path / "step-00000002"
    kept.mkdir()
    for checkpoint in (deleted, kept):
        sink.log_checkpoint(checkpoint)
    (call,) = run.log_artifact.call_args_list
    assert call.kwargs["aliases"] == ["latest", "step-00000004"]


def test_the_summary_of_a_run_is_recorded_without_its_texts(tmp_path: Path):
    sink, _ = sink_of(tmp_path, run := mock.Mock(id="abc", summary={"loss": 2.0}))
    sink.finish({"loss": 1.5, "mfu": 0.4, "samples": [{"prompt": "a", "text": "b"}]}, 3)
    assert run.summary == {"loss": 1.5, "mfu": 0.4}
    run.finish.assert_called_once_with(exit_code=3)
