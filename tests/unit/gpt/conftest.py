"""A fixture of tests that run a trainer, or read what it would train on."""

from pathlib import Path

import pytest

from tests.unit.gpt.runs_in_process import write_text


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the PREFIX of some thousand tokens. Tests of one file may share what is cached beside it."""
    return write_text(tmp_path_factory.mktemp("text") / "corpus")
