"""The checkpoints of two runs, written once."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.unit.gpt.checkpoint.runs import save_runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the runs, which tests do not change."""
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(2, save_runs, folder)
    return folder
