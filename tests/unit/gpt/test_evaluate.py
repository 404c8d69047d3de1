"""The evaluation of a text: its documents, and its tokenizer."""

import json
from pathlib import Path

import pytest

from data.errors import DataError
from data.sources import Source
from data.tokenizer import load_tokenizer
from gpt.evaluate import find_tokenizer, read_text
from parallel.validation.errors import ConfigError
from tests.unit.gpt.runs_in_process import write_text


def test_documents_begin_on_new_lines(tmp_path: Path):
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in ("one two", "", "three\n", "four")))
    assert read_text(Source([str(file)], "body", None, "test")) == "one two\nthree\nfour\n"
    file.write_text(json.dumps({"body": " \n"}) + "\n")
    with pytest.raises(DataError, match=r"--source .*documents.jsonl has 0 words"):
        read_text(Source([str(file)], "body", None, "test"))


def test_the_tokenizer_is_the_named_one_or_that_of_the_first_prefix(tmp_path: Path):
    prefix = write_text(tmp_path / "corpus")
    tokenizer = load_tokenizer(prefix)
    size = tokenizer.vocab_size
    named = tmp_path / "named.json"
    tokenizer.save(named)
    for name, path in ((None, str(prefix)), (None, [str(prefix), "nowhere"]), (str(named), "nowhere")):
        assert find_tokenizer(name, path, size).encode("green") == tokenizer.encode("green")
        with pytest.raises(ConfigError, match=f"model.vocab_size={size - 1} is below the {size} ids"):
            find_tokenizer(name, path, size - 1)
