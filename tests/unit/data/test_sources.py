"""Sources: which files and documents are read, their weights, and the sample that a tokenizer is trained on."""

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from data.errors import DataError
from data.sources import Document, Shard, Source, _read_rows, text_of
from tests.fuzz import bounded_work


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_that_vanishes_before_it_is_read_is_named(tmp_path: Path, name: str):
    file = tmp_path / name
    file.write_text("{}")
    source = Source([str(file)])
    assert source.weight() == 2
    assert Source([str(file)], max_documents=1).weight() is None  # nobody knows how much of the file is read
    file.unlink()
    with pytest.raises(DataError, match=rf"cannot read .*{name}.*; correct it or leave it out"):
        list(source.documents())


@pytest.mark.parametrize("texts", [["one" * 30_000, "two", "three" * 9_000], ["one"]], ids=len)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_the_weights_of_all_documents_are_that_of_their_file(tmp_path: Path, ending: str, texts: list[str]):
    file = tmp_path / f"a.{ending}"
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
    assert len(weights) == len(texts)
    assert sum(weights) == pytest.approx(source.weight())
    assert min(weights) >= 0


def test_a_column_of_parquet_may_be_a_dictionary_of_texts(tmp_path: Path):
    texts = ["one", None, "two", "one"]
    columns = {"text": pa.array(texts).dictionary_encode(), "number": pa.array([1, 2, 1, 1]).dictionary_encode()}
    parquet.write_table(pa.table(columns | {"list": [["one"]] * 4}), tmp_path / "a.parquet")
    documents = Source([str(tmp_path / "a.parquet")]).documents()
    assert [text_of(document, "text") for document in documents] == ["one", "", "two", "one"]
    for name in ("number", "list"):
        with pytest.raises(DataError, match=f"has no column of text called {name}"):
            list(Source([str(tmp_path / "a.parquet")], name).documents())


def test_a_small_parquet_file_of_large_documents_does_not_fill_the_memory(tmp_path: Path, monkeypatch: Any):
    """A dictionary has one document for hundreds of rows, and a page of one row has many bytes."""
    texts, file = pa.DictionaryArray.from_arrays([0] * 300, ["a" * 2**22]), str(tmp_path / "a.parquet")
    parquet.write_table(pa.table({"text": texts}), file, compression="zstd", dictionary_pagesize_limit=2**30)
    with bounded_work():
        document, *_ = islice(Source([file]).documents(), 20)
    assert len(text_of(document, "text")) == 2**22
    monkeypatch.setattr("data.sources.MAX_LINE_BYTES", 1000)
    parquet.write_table(pa.table({"text": ["a" * 2001, "b"]}), file)
    with pytest.raises(DataError, match=r"has \d,\d+ bytes of text in 2 rows, more than 1,000 in each; split"):
        next(Source([file]).documents())


def test_a_parquet_file_without_rows_has_no_documents(tmp_path: Path):
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert list(Source([str(tmp_path / "a.parquet")]).documents()) == []


def test_globs_go_into_folders_and_a_file_with_the_name_of_a_glob_is_that_file(tmp_path: Path):
    (tmp_path / "one" / "two").mkdir(parents=True)
    for name in ("one/two/a.txt", "one/b.txt", "c[1].txt", "c1.txt"):
        (tmp_path / name).write_text(name)
    for pattern, found in (("**/[ab].txt", ["one/b.txt", "one/two/a.txt"]), ("c[1].txt", ["c[1].txt"])):
        documents = Source([f"{tmp_path}/{pattern}"]).documents()
        assert [document.content for document in documents] == [name.encode() for name in found]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.ndjson.gz"])
def test_json_lines_have_several_names_and_may_begin_with_a_byte_order_mark(tmp_path: Path, name: str):
    content = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two")).encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [text_of(document, "text") for document in Source([str(tmp_path)]).documents()] == ["one", "two"]


def test_a_text_file_is_read_without_its_byte_order_mark(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one", encoding="utf-8-sig")
    assert [text_of(document, "text") for document in Source([str(tmp_path)]).documents()] == ["one"]


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.txt.gz"])
def test_a_compressed_file_that_is_not_read_is_refused_with_the_remedy(tmp_path: Path, name: str):
    for exists in (False, True):
        with pytest.raises(DataError, match=f"{name} is compressed; decompress it" if exists else "no such file"):
            list(Source([str(tmp_path / name)]).documents())
        (tmp_path / name).touch()


def test_what_a_folder_or_a_pattern_leaves_out_is_named_and_compressed_text_refused(tmp_path: Path, caplog):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    (folder / "sub").mkdir(parents=True)
    elsewhere.mkdir()
    for name in ("README.md", "sub/a.txt", ".hidden.csv", "../elsewhere/b.txt"):
        (folder / name).write_text("a")
    assert len(list(Source([str(folder)]).documents())) == 2
    assert caplog.messages == []
    (folder / "linked").symlink_to(elsewhere)
    (folder / "dangling.txt").symlink_to("nothing")
    (folder / "sub/b.csv").touch()
    assert len(list(Source([str(folder)]).documents())) == 2
    left_out = f"1 folders, such as {folder}/linked and 2 files, such as {folder}/dangling.txt"
    assert caplog.messages == [f"--source {folder} leaves out {left_out}; name them too if they are meant"]
    assert len(list(Source([f"{folder}/**/*.txt"]).documents())) == 2
    assert len(list(Source([f"{folder}/*"]).documents())) == 1
    assert f"leaves out 2 folders, such as {folder}/linked and 1 files" in caplog.messages[1]
    (folder / "sub/c.jsonl.zst").touch()
    with pytest.raises(DataError, match=r"sub/c.jsonl.zst is compressed; decompress it, or"):
        list(Source([str(folder)]).documents())


def shard(weight: int | None, *texts: str) -> Shard:
    return Shard(weight, lambda: (Document("a", 0, text, 0) for text in texts), "")


@pytest.mark.parametrize(
    ("sample_bytes", "shards", "expected"),
    [
        # 15, 20 and 50 bytes up to the end of a shard: what the first takes too many, the second has to do without
        (50, [shard(30, *["a" * 10] * 3), shard(10, "b" * 10), shard(60, *["c" * 10] * 6)], "a" * 20 + "c" * 30),
        (10, [shard(10, *["a"] * 10), shard(None, *["b"] * 99), shard(10, *["c"] * 10)], "a" * 5 + "b" * 10 + "c" * 5),
        (9, [shard(1, "a"), shard(0), shard(2, "b" * 9)], "a" + "b" * 9),
        (6, [shard(3, "Ψ", "Ψ", "a"), shard(3, "b", "c", "d")], "ΨΨbc"),
        (9, [shard(0)], ""),
    ],
)
def test_a_sample_is_of_all_shards_by_weight_and_of_each_from_the_beginning(
    sample_bytes: int, shards: list[Shard], expected: str
):
    source = Source([])
    vars(source)["shards"] = shards
    assert "".join(source.sample(sample_bytes)) == expected


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_a_document_of_the_largest_size_is_read_and_a_larger_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.setattr("data.sources.MAX_DOCUMENT_BYTES", 10)
    file = tmp_path / f"a.{kind}"

    def read(text: str) -> list[str]:
        file.write_text(json.dumps({"text": text}) if kind == "jsonl" else text)
        return [text_of(document, "text") for document in Source([str(file)]).documents()]

    assert read("a" * 10) == ["a" * 10]
    with pytest.raises(DataError, match=rf"a.{kind}(:1)? is one document of 11 bytes, more than 10; split it"):
        read("a" * 11)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_line_that_is_too_long_is_left_out_before_it_is_in_memory(tmp_path, monkeypatch, ending: str):
    monkeypatch.setattr("data.sources.MAX_LINE_BYTES", 20)
    file = tmp_path / f"a.{ending}"

    def read(length: int) -> list[Document]:
        lines = b'{"text": "one"}\n' + b"x" * length + b'\n{"text": "two"}\n'
        file.write_bytes(gzip.compress(lines) if ending.endswith("gz") else lines)
        return list(Source([str(file)]).documents())

    one, long, two = read(150)
    assert (text_of(one, "text"), text_of(two, "text")) == ("one", "two")
    with pytest.raises(DataError, match=rf"a.{ending}:2 is a line of more than 20 bytes; split its document"):
        text_of(long, "text")
    with pytest.raises(DataError, match=rf"a.{ending}:2 is a line of more than 160 bytes, too long to be skip"):
        read(200)


class Rows(list):
    """The rows of a dataset whose columns are not known before they are read; an exception stands for a broken one."""

    features = None

    def __iter__(self):
        for row in super().__iter__():
            if isinstance(row, Exception):
                raise row
            yield row


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"text": 7}, "^user/corpus:2 has no text under --text_key text; its keys are text$"),
        ({"body": "a"}, "^user/corpus:2 has no text under --text_key text; its keys are body$"),
        (OSError("no network\nat all"), "^cannot read the dataset user/corpus: no network; .*$"),
    ],
    ids=["number", "other column", "network"],
)
def test_a_row_of_a_dataset_that_cannot_be_read_ends_it_with_its_place(broken: object, message: str):
    documents = _read_rows("user/corpus", Rows([{"text": "a"}, broken, {"text": "b"}]), "text")
    assert next(documents) == Document("user/corpus", 1, "a", 1)
    with pytest.raises(DataError, match=message):
        text_of(next(documents), "text")
