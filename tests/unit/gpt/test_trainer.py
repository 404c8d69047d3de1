"""The words of a trainer about a run that it resumes."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt.run_folder.files import MetricsFile
from gpt.schedule import learning_rate
from gpt.settings.parser import parse_settings
from gpt.trainer import Trainer
from tests.unit.gpt.run_folder.test_files import record
from tests.unit.gpt.test_build import BASE


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
    rate = learning_rate(settings.schedule, settings.optimizer.lr, 19, 100)
    MetricsFile(tmp_path).append(record(20) if factor is None else record(20, lr=factor * rate))
    trainer = SimpleNamespace(_settings=settings, _folder=tmp_path, _progress=SimpleNamespace(step=step))
    with caplog.at_level(logging.WARNING):
        Trainer._warn_if_rate_changed(trainer)
    assert bool(caplog.messages) == is_warned
