"""Sources: a file that can no longer be read is named, whatever its kind."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

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


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_the_weights_of_all_documents_are_that_of_their_file(tmp_path: Path, ending: str):
    file, texts = tmp_path / f"a.{ending}", ["one" * 30_000, "two", "three" * 9_000]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    match ending:
        case "jsonl":
            file.write_bytes(lines)
        case "jsonl.gz":
            file.write_bytes(gzip.compress(lines))
        case "parquet":
            parquet.write_table(pa.table({"text": texts}), file)
    source = Source([str(file)])
    weights = [document.weight for document in source.documents()]
    assert len(weights) == 3
    assert sum(weights) == pytest.approx(source.weight())
    assert min(weights) >= 0
