"""The words of a trainer about a run that it resumes."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt.run_folder.files import NUMBERS_OF_A_STEP, MetricsFile
from gpt.schedule import learning_rate
from gpt.settings.parser import parse_settings
from gpt.trainer import Trainer
from tests.unit.gpt.test_build import BASE


@pytest.mark.parametrize(
    ("logged", "step", "is_warned"),
    [
        ({"lr": True}, 20, False),
        ({"lr": 0.5}, 20, True),
        ({"lr": 0.5}, 100, False),  # there are no steps left
        ({}, 20, False),
    ],
)
def test_a_resumed_run_warns_if_its_learning_rate_jumps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, logged: dict, step: int, is_warned: bool
):
    settings = parse_settings([f"--config={BASE}", "--train.steps=100", "--schedule.warmup_steps=10"])
    rate = learning_rate(settings.schedule, settings.optimizer.lr, 19, 100)
    record = (
        dict.fromkeys(NUMBERS_OF_A_STEP, 1.0)
        | {"step": 20}
        | {name: rate if value is True else value for name, value in logged.items()}
    )
    MetricsFile(tmp_path).append(record)
    trainer = SimpleNamespace(_settings=settings, _folder=tmp_path, _progress=SimpleNamespace(step=step))
    with caplog.at_level(logging.WARNING):
        Trainer._warn_if_rate_changed(trainer)
    assert bool(caplog.messages) == is_warned
