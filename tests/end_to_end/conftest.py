"""Fixtures of the tests of the whole program."""

from pathlib import Path

import pytest

from lab.faults.runs import prepare_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the PREFIX of a few thousand tokens, which tests do not change."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))
