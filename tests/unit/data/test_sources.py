"""Sources: a file that can no longer be read is named, whatever its kind."""

from pathlib import Path

import pytest

from data.errors import DataError
from data.sources import Source


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_that_vanishes_before_it_is_read_is_named(tmp_path: Path, name: str):
    file = tmp_path / name
    file.write_text("{}")
    source = Source([str(file)])
    assert source.weight() == 2
    file.unlink()
    with pytest.raises(DataError, match=rf"cannot read .*{name}.*; correct it or leave it out"):
        list(source.documents())
