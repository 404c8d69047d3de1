"""A trainer: its words about a run that it resumes, the speed that it logs, and when it rolls back."""

import itertools
import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpt.trainer
from gpt.checkpoint.folder import checkpoints
from gpt.monitor import metrics, profiling
from gpt.monitor import records as monitor_records
from gpt.monitor.records import Records
from gpt.run_folder.files import MetricsFile, read_steps
from gpt.settings.parser import parse_settings
from gpt.settings.schedule import learning_rate
from tests.unit.gpt.builder.test_train_state import BASE
from tests.unit.gpt.monitor.test_sinks import RecordingSink
from tests.unit.gpt.run_folder.test_files import record
from tests.unit.gpt.runs_in_process import SEQ_LENGTH, make_trainer, write_text


@pytest.mark.parametrize(
    ("factor", "step", "is_warned"),  # of the learning rate that the settings give to the last logged step
    [
        (1.0, 20, False),
        (0.5, 20, True),
        (0.5, 100, False),  # there are no steps left
        (None, 20, False),  # no rate was logged
    ],
)
def test_a_resumed_run_warns_if_its_learning_rate_jumps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, factor: float | None, step: int, is_warned: bool
):
    settings = parse_settings([f"--config={BASE}", "--train.steps=100", "--schedule.warmup_steps=10"])
    rate, following = (learning_rate(settings.schedule, settings.optimizer.lr, step, 100) for step in (19, 20))
    MetricsFile(tmp_path).append(record(20) if factor is None else record(20, lr=factor * rate))
    settings = replace(settings, run=replace(settings.run, dir=str(tmp_path)))
    with caplog.at_level(logging.WARNING), Records(settings, is_first=True).tracked(step):
        pass
    found = [message.partition(" (")[0] for message in caplog.messages]
    warning = f"step 20 had the learning rate {0.5 * rate:.2e}, and step 21 gets {following:.2e}"
    assert found == [f"warning: the schedule has changed: {warning}"] * is_warned


def test_each_validation_corpus_has_a_loss_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, words in (("train", "green bottles"), ("wiki", "bottles green"), ("code", "to seeg bent rell")):
        (tmp_path / name).mkdir()
        write_text(tmp_path / name / f"{name}-text", words)

    def losses(run: str, *names: str) -> dict[str, float]:
        """Return the validation losses of a run of one step, and of one without a validation share in its data."""
        paths = [str(tmp_path / name / f"{name}-text") for name in names]
        settings = {"train__eval_samples": 4, "train__steps": 1, "data__split": "[1, 0, 0]"}
        settings["data__validation"] = json.dumps(paths)
        make_trainer(tmp_path / "train/train-text", tmp_path / run, **settings).train()
        (step,) = read_steps(tmp_path / run)
        return {name: value for name, value in step.items() if name.startswith("validation_loss")}

    both, (wiki, code) = losses("both", "wiki", "code"), (losses(name, name) for name in ("wiki", "code"))
    printed = capsys.readouterr().out
    assert wiki["validation_loss"] != code["validation_loss"]
    assert both == {
        "validation_loss": (wiki["validation_loss"] + code["validation_loss"]) / 2,
        "validation_loss/wiki-text": wiki["validation_loss"],
        "validation_loss/code-text": code["validation_loss"],
    }
    assert f"; wiki-text {wiki['validation_loss']:.4f}; code-text {code['validation_loss']:.4f}" in printed


@pytest.mark.parametrize(
    ("last", "minutes", "is_saved"), [("true", 0, True), ("false", 0, False), ("false", 1e-6, True)]
)
def test_a_run_without_other_settings_saves_at_its_end_and_from_time_to_time(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, minutes: float, is_saved: bool
):
    monkeypatch.setattr(Records, "on_save", lambda *_: os.kill(os.getpid(), signal.SIGUSR1))  # asks the run to stop
    settings = {"checkpoint__last": last, "checkpoint__every_minutes": minutes, "train__log_every": 100}
    make_trainer(prefix, tmp_path, train__steps=20_000 if minutes else 3, **settings).train()
    saved = checkpoints(tmp_path / "checkpoints")
    assert bool(saved) == is_saved
    assert not minutes or min(saved) < 20_000


def test_a_run_is_logged_with_its_speed_between_evaluations_samples_and_saves(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now = 0.0
    seconds = {"data": 2.0, "evaluation": 10.0, "sampling": 10.0, "checkpoint": 10.0}  # a step reads one batch

    @contextmanager
    def phase_of_known_time(phase: str) -> Iterator[None]:
        nonlocal now
        yield
        now += seconds.get(phase, 0.0)

    sink = RecordingSink()
    monkeypatch.setattr(monitor_records, "sink_openers", lambda *_: {"recording": lambda: sink})
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now))
    every = {"train__eval_every": 2, "train__sample_every": 3, "train__layer_grad_norms_every": 3}
    every["checkpoint__every"] = 4
    trainer = make_trainer(prefix, tmp_path, train__eval_samples=3, train__sample_tokens=2, **every)
    trainer.state.mesh.log.on_phase = phase_of_known_time
    now += 10.0  # such as for a checkpoint to resume from
    assert trainer.num_steps_done == 0
    trainer.train()
    steps = read_steps(tmp_path)
    assert [step["tokens_per_second"] for step in steps] == [4 * SEQ_LENGTH / 2.0] * 6
    assert [step["tokens"] for step in steps] == [4 * SEQ_LENGTH * step for step in range(1, 7)]
    assert [step["step"] for step in steps if "validation_loss" in step] == [2, 4, 6]
    assert [step["step"] for step in steps if "samples" in step] == [3, 6]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-00000004", "step-00000006"]
    for step in steps:
        has_norms, is_full = step["step"] in (3, 6), "memory/parameters_bytes" in step and "loss_scale" not in step
        assert is_full
        assert any(name.startswith("grad_norm/") for name in step) == has_norms
    groups = trainer.state.optimizer.param_groups
    assert {steps[-1]["lr"]} == {group["lr"] for group in groups} < {step["lr"] for step in steps}
    assert [call for call in sink.calls if isinstance(call, int)] == [1, 2, 3, 4, 5, 6]
    assert sink.calls[-1] == ("finish", steps[-1], 0)
    printed = capsys.readouterr().out
    assert all(f" {step}/6 " in printed for step in range(1, 7))
    assert "Summary" in printed
    assert "loss.png and all other files of the run are in" in printed
    assert (tmp_path / "loss.png").exists()


def test_a_trainer_profiles_and_compares_replicas_at_the_steps_of_the_settings(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    compared: list[int] = []
    monkeypatch.setattr(gpt.trainer, "compare_replicas", lambda _state, step: compared.append(step))
    ticks = itertools.count()
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    settings = {"profile__steps": "[2, 3]", "profile__collectives_step": 4, "train__log_every": 4}
    make_trainer(prefix, tmp_path, guard__check_replicas_every=2, **settings).train()
    assert [step["step"] for step in read_steps(tmp_path)] == [1, 4, 6]
    assert compared == [2, 4, 6]
    (timers,) = json.loads((tmp_path / "profile" / "timers.json").read_text())
    # The clock ticks once while a step reads its batch, and once in the forward of each of its two micro-batches.
    assert (timers["data"], timers["forward"]) == (1, 2)
    assert (tmp_path / "collectives.json").exists()
    printed = capsys.readouterr().out
    assert "no stragglers" in printed
    assert "forward" in printed[: printed.index("no stragglers")]
