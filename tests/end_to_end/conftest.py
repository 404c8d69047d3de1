"""What all tests of the whole program begin with."""

from pathlib import Path

import pytest

from tests.end_to_end.runs import prepare_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PREFIX of a few thousand tokens, which no test changes."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))
