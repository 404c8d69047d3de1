"""python -m data.prepare: its sources, its files and its errors. Every run starts real worker processes."""

import errno
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType
from unittest import mock

import pyarrow as pa
import pytest
from filelock import FileLock
from pyarrow import parquet
from rich.progress import Progress as ProgressBar
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from data.blend import open_samples
from data.check import check_corpus
from data.chosen_tokenizers import character_tokenizer, train_tokenizer
from data.encode import Encoded, encode_in_order
from data.errors import DataError
from data.indexed import IndexedDataset, check_index
from data.prepare import main
from data.sidecar import Sidecar
from data.sources import Document, Source, text_of
from data.staging import reserved
from data.tokenizer import load_tokenizer
from tests.programs import files_of_at_most

TEXTS = [f"document {i} says {'again ' * (i % 7)}Ψ{i * i}\n" for i in range(40)]
SUFFIXES = (".bin", ".idx", ".json", ".tokenizer.json")


@pytest.fixture
def datasets() -> ModuleType:
    import datasets  # here: every process of a suite collects this file, one runs it, and it takes seconds

    return datasets


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> str:
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    train_tokenizer(TEXTS, 300).save(path)
    return str(path)


def _json_lines(texts: list[str | None], key: str = "text") -> str:
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts))


def _documents(prefix: Path) -> list[str]:
    """Return the decoded documents of a corpus. Each must hold one end-of-document token, at its end."""
    tokenizer = load_tokenizer(prefix)
    sequences = [tokens.tolist() for tokens in IndexedDataset(prefix)]
    assert all(tokens.index(tokenizer.eod) == len(tokens) - 1 for tokens in sequences)
    return [tokenizer.decode(tokens[:-1]) for tokens in sequences]


def _read(source: Source) -> list[str | bytes | None]:
    return [document.content for document in source.documents()]


def _rejected(prefix: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(f"{prefix}.rejected.jsonl").read_text().splitlines()]


def _command(source: str | Path, output: Path, *options: str) -> list[str]:
    """Return the arguments of a run with one worker process."""
    return ["--source", str(source), "--output", str(output), "--workers", "1", *options]


@pytest.fixture
def small_command(tmp_path: Path) -> list[str]:
    """The arguments of a run that makes out/corpus of one text."""
    (tmp_path / "a.txt").write_text(TEXTS[0])
    return _command(tmp_path / "a.txt", tmp_path / "out" / "corpus", "--train_vocab_size", "257")


def _error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error message of a run, which must be one line and end with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_status:
        main(list(arguments))
    message = capsys.readouterr().err
    assert exit_status.value.code == 2
    assert message.count("\n") == 1
    return message


def test_files_of_every_kind_in_one_directory_become_one_corpus(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal: the line has no colors, and is not wrapped
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "b.jsonl").write_text(_json_lines([TEXTS[1], None, "", TEXTS[2]]) + "\n")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(_json_lines(TEXTS[3:9]).encode()))
    parquet.write_table(pa.table({"text": [*TEXTS[9:20], None], "id": range(12)}), folder / "d.parquet")
    (folder / "picture.png").write_bytes(b"\xff")
    prefix = tmp_path / "out" / "corpus"
    (tmp_path / "out" / ".corpus.unfinished" / "left by a killed process").mkdir(parents=True)
    main(_command(folder, prefix, "--train_vocab_size", "280"))
    assert _documents(prefix) == TEXTS[:20]
    assert sorted(path.name for path in prefix.parent.iterdir()) == sorted(f"corpus{suffix}" for suffix in SUFFIXES)
    assert Sidecar.load(prefix) == Sidecar(
        vocab_size=280,
        eod=0,
        empty=4,
        tokenizer="trained",
        documents=20,
        tokens=IndexedDataset(prefix).num_tokens,
        source=[str(folder)],
        vocabulary_hash=load_tokenizer(prefix).vocabulary_hash,
        checksums={
            suffix: zlib.crc32(Path(f"{prefix}{suffix}").read_bytes()) for suffix in (*SUFFIXES[:2], SUFFIXES[3])
        },
    )
    num_tokens = IndexedDataset(prefix).num_tokens
    assert (
        capsys.readouterr().out
        == f"{prefix}: 20 documents (4 empty ones left out), {num_tokens:,} tokens, vocabulary 280\n"
    )


def test_parts_are_read_as_the_corpus_of_one_command(tmp_path, capsys, tokenizer_file):
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_text(_json_lines(TEXTS[4 * number : 4 * number + 4]))
    options = [*_command(tmp_path / "*.jsonl", tmp_path / "whole"), "--tokenizer", str(tokenizer_file)]
    main(options)
    whole, corpus = tmp_path / "whole", str(tmp_path / "corpus")
    of_part = [*options, "--output", corpus, "--part"]
    assert "--part 1/6 is one of 6 parts, and --source has 5 files" in _error_of(capsys, *of_part, "1/6")
    main([*of_part, "3/3"])
    with pytest.raises(DataError, match=r"corpus.idx does not exist: .*corpus lacks the parts 1/3 2/3; prepare them$"):
        IndexedDataset(corpus)
    for part in ("1/3", "2/3"):
        main([*of_part, part])
    assert _documents(Path(corpus)) == TEXTS[:20]
    assert Path(f"{corpus}.idx").read_bytes() == Path(f"{whole}.idx").read_bytes()
    assert check_corpus(corpus).partition(":")[2] == check_corpus(str(whole)).partition(":")[2]

    def samples(prefix: str | Path) -> list[list[int]]:
        found = open_samples(str(prefix), split=[1, 0, 0], seq_length=8, seed=1)
        return [found[number].tolist() for number in range(20)]

    assert samples(corpus) == samples(whole)
    (tmp_path / "2.jsonl").write_text(_json_lines(TEXTS[20:24]))
    named = r"corpus.part-2-of-3 was prepared from another source or with other options than .*corpus.part-1-of-3;"
    assert re.search(named, _error_of(capsys, *of_part, "2/3", "--overwrite"))
    with pytest.raises(DataError, match=r"corpus.part-2-of-3.bin (has \d+ bytes|was prepared again)"):
        check_index(IndexedDataset(corpus))
    Path(f"{corpus}.part-3-of-3.bin").unlink()
    with pytest.raises(DataError, match=r"corpus.part-3-of-3.bin does not exist"):
        IndexedDataset(corpus)


def test_wrong_documents_are_listed_in_a_file_if_errors_are_skipped(tmp_path, capsys, tokenizer_file):
    lines = [json.dumps({"text": TEXTS[0]}), "{broken", '{"text": 1}', json.dumps({"text": TEXTS[1]}), '{"text": null}']
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}\n\n')
    output = tmp_path / "corpus"
    arguments = _command(tmp_path / "a.jsonl", output)
    assert "a.jsonl:2 is not JSON" in _error_of(capsys, *arguments, "--tokenizer", tokenizer_file)
    for tokenizer in (["--tokenizer", tokenizer_file], ["--train_vocab_size", "258"]):
        main([*arguments, *tokenizer, "--on_error", "skip", "--overwrite"])
        assert _documents(output) == TEXTS[:2]
        rejected = _rejected(output)
        assert [found["place"] for found in rejected] == [f"{tmp_path}/a.jsonl:{line}" for line in (2, 3, 6)]
        assert [found["text"] for found in rejected] == ["{broken\n", '{"text": 1}\n', '{"text": "\\xff"}\n']
        assert "not JSON" in rejected[0]["reason"]
        assert f"2 documents (2 empty ones left out, 3 rejected ({output}.rejected.jsonl))" in capsys.readouterr().out
    (tmp_path / "a.jsonl").write_text(lines[0])
    main([*arguments, "--characters", "--overwrite"])
    assert not Path(f"{output}.rejected.jsonl").exists(), "it is that of another corpus"


def test_a_document_that_the_tokenizer_cannot_encode_is_named_and_can_be_skipped(tmp_path, capsys):
    character_tokenizer(["abc"]).save(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text(_json_lines(["ab", "a\N{SNOWMAN}", "", "cab"]))
    output = tmp_path / "corpus"
    arguments = _command(tmp_path / "a.jsonl", output, "--tokenizer", str(tmp_path / "tokenizer.json"))
    assert "a.jsonl:2: the tokenizer cannot encode a text" in _error_of(capsys, *arguments)
    main([*arguments, "--on_error", "skip"])
    assert _documents(output) == ["ab", "cab"]
    (rejected,) = _rejected(output)
    assert rejected["place"] == f"{tmp_path}/a.jsonl:2"
    assert (Sidecar.load(output).empty, Sidecar.load(output).rejected) == (1, 1)


def test_an_output_in_the_folder_of_the_source_goes_on_and_is_no_text(tmp_path, capsys, monkeypatch, tokenizer_file):
    monkeypatch.setattr("data.encode.BATCH_BYTES", 300)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text(_json_lines(TEXTS))
    (folder / "b.jsonl").write_text("broken")
    arguments = _command(folder, folder / "corpus", "--tokenizer", tokenizer_file)
    _error_of(capsys, *arguments)
    main([*arguments, "--on_error", "skip"])
    assert "corpus: goes on after" in capsys.readouterr().err
    (folder / "corpus.cache").mkdir()
    (folder / "corpus.cache" / "order.crc32.json").write_text("{}")
    assert Path(f"{folder}/corpus.rejected.jsonl").exists()
    assert {document.origin for document in Source([str(folder)]).documents()} == {
        str(folder / name) for name in ("a.jsonl", "b.jsonl")
    }


@pytest.mark.parametrize(("is_killed", "bos"), [(False, "none"), (True, "none"), (True, "<|endoftext|>")])
def test_a_preparation_that_was_ended_goes_on_where_its_progress_was_saved(
    tmp_path, monkeypatch, capsys, tokenizer_file, is_killed, bos
):
    monkeypatch.setattr("data.encode.BATCH_BYTES", 300)
    monkeypatch.setattr("data.prepare.BATCHES_BETWEEN_SAVES", 2 if is_killed else 100)
    rows = [*TEXTS[:5], None, *TEXTS[5:30]]
    (tmp_path / "a.jsonl").write_text(_json_lines(rows) + "broken\n" + _json_lines(TEXTS[30:]))
    outputs = [tmp_path / name / "corpus" for name in ("whole", "ended")]
    options = "--tokenizer", tokenizer_file, "--bos_token", bos
    arguments = [_command(tmp_path / "a.jsonl", output, *options) for output in outputs]
    main([*arguments[0], "--on_error", "skip"])
    num_read = []
    unfinished = outputs[1].with_name(".corpus.unfinished")

    def encode(encoder, documents, num_workers):
        for number, encoded in enumerate(encode_in_order(encoder, documents, num_workers), 1):
            num_read.append(encoded.num_read)
            if is_killed and number == 4:
                shutil.copytree(unfinished, tmp_path / "killed")  # two batches are saved, and a third is not
            yield encoded

    monkeypatch.setattr("data.prepare.encode_in_order", encode)
    _error_of(capsys, *arguments[1])
    assert not Path(f"{outputs[1]}.idx").exists()
    if is_killed:
        shutil.rmtree(unfinished)
        (tmp_path / "killed").rename(unfinished)
        num_saved = sum(num_read[:2])
    else:
        num_saved = sum(num_read)
    num_read.clear()
    main([*arguments[1], "--on_error", "skip"])
    assert 0 < num_saved == len(TEXTS) + 2 - sum(num_read)
    assert f"goes on after {len(TEXTS) + 2 - sum(num_read)} documents" in capsys.readouterr().err
    for suffix in (*SUFFIXES, ".rejected.jsonl"):
        assert Path(f"{outputs[0]}{suffix}").read_bytes() == Path(f"{outputs[1]}{suffix}").read_bytes()
    assert len(list(outputs[1].parent.iterdir())) == len(SUFFIXES) + 1


def test_progress_of_other_documents_is_not_continued(tmp_path, monkeypatch, capsys, tokenizer_file):
    monkeypatch.setattr("data.encode.BATCH_BYTES", 300)
    arguments = _command(tmp_path / "a.jsonl", tmp_path / "corpus", "--tokenizer", tokenizer_file)
    (tmp_path / "a.jsonl").write_text(_json_lines(TEXTS) + "broken")
    _error_of(capsys, *arguments)
    (tmp_path / "a.jsonl").write_text(_json_lines(TEXTS[::-1]))
    main(arguments)
    assert _documents(tmp_path / "corpus") == TEXTS[::-1]


@pytest.mark.parametrize("kind", ["lines", "table", "dataset", "hub"])
def test_a_source_whose_content_has_changed_has_another_version(tmp_path, monkeypatch, datasets, kind):
    """A preparation that was interrupted then does not go on with the rest of other documents."""

    def version_of(number: int) -> str:
        rows = datasets.Dataset.from_dict({"text": [str(number)]})
        if kind == "hub":
            files = {"train": mock.Mock(origin_metadata=[("user/corpus", f"revision {number}")])}
            builder = mock.Mock(hash="same", config=mock.Mock(data_files=files))
            monkeypatch.setattr("datasets.load_dataset_builder", lambda *_: builder)
            return Source(["user/corpus"]).shards[0].version
        folder = tmp_path / "texts"
        if kind == "dataset":
            rows.save_to_disk(folder)
        else:
            folder.mkdir(exist_ok=True)
            (rows.to_csv if kind == "table" else rows.to_json)(folder / ("a.csv" if kind == "table" else "a.jsonl"))
        for path in folder.iterdir():
            os.utime(path, (number, number))
        (shard,) = Source([str(folder)]).shards
        return shard.version

    assert version_of(1) == version_of(1) != version_of(2)


def test_a_tokenizer_alone_is_written_and_named_by_its_prefix(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXTS[0])
    main(_command(tmp_path, tmp_path / "words", "--train_vocab_size", "258", "--tokenizer_only"))
    assert [path.name for path in tmp_path.glob("words*")] == ["words.tokenizer.json"]
    assert capsys.readouterr().out == f"{tmp_path / 'words'}: a tokenizer, vocabulary 258\n"
    main(_command(tmp_path, tmp_path / "one", "--tokenizer", str(tmp_path / "words")))
    main(_command(tmp_path, tmp_path / "two", "--tokenizer", str(tmp_path / "one")))
    files = [Path(f"{tmp_path / name}.tokenizer.json").read_bytes() for name in ("words", "one", "two")]
    assert files == [files[0]] * 3


def test_documents_begin_with_the_token_that_the_tokenizer_puts_before_a_text(tmp_path, tokenizer_file):
    backend = Backend.from_file(tokenizer_file)
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 300)])
    folder = tmp_path / "family"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text(_json_lines(TEXTS[:3]))
    begins = []
    for name, given, options in (("bos", folder, ()), ("none", folder, ("--bos_token", "none")), ("corpus", "bos", ())):
        main(_command(tmp_path / "a.jsonl", tmp_path / name, "--tokenizer", str(tmp_path / given), *options))
        tokenizer = load_tokenizer(tmp_path / name)
        begins.append([tokens[0] == 300 for tokens in IndexedDataset(tmp_path / name)])
        assert [
            tokenizer.decode(tokens[:-1][tokens[:-1] != 300]) for tokens in IndexedDataset(tmp_path / name)
        ] == TEXTS[:3]
        assert (tokenizer.bos, tokenizer.start) == ((None, 0) if name == "none" else (300, 300))
    assert begins == [[True] * 3, [False] * 3, [True] * 3]


def test_the_number_of_workers_does_not_change_a_byte(tmp_path, tokenizer_file, monkeypatch):
    monkeypatch.setattr("data.encode.BATCH_BYTES", 300)
    (tmp_path / "corpus.jsonl").write_text(_json_lines(TEXTS))
    for workers in ("1", "3"):
        options = "--tokenizer", tokenizer_file, "--workers", workers
        main(_command(tmp_path / "corpus.jsonl", tmp_path / f"workers{workers}", *options))
    for suffix in SUFFIXES:
        assert Path(f"{tmp_path}/workers1{suffix}").read_bytes() == Path(f"{tmp_path}/workers3{suffix}").read_bytes()
    assert _documents(tmp_path / "workers3") == TEXTS


def test_progress_counts_documents_and_tokens_up_to_the_whole_source(tmp_path, tokenizer_file, capfd):
    (tmp_path / "a.jsonl").write_text(_json_lines(TEXTS))
    arguments = _command(tmp_path / "a.jsonl", tmp_path / "corpus", "--tokenizer", tokenizer_file)
    with mock.patch.object(ProgressBar, "update", autospec=True, side_effect=ProgressBar.update) as update:
        main(arguments)
    shown = [call.kwargs for call in update.call_args_list]
    corpus = IndexedDataset(tmp_path / "corpus")
    assert (shown[-1]["documents"], shown[-1]["tokens"]) == (len(TEXTS), sum(map(len, corpus)))
    assert sum(step["advance"] for step in shown) == (tmp_path / "a.jsonl").stat().st_size
    assert capfd.readouterr().err == ""  # which is no terminal, and the seconds between lines have not passed
    with mock.patch("data.prepare.SECONDS_BETWEEN_LINES", 0):
        main([*arguments, "--overwrite"])
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"corpus 100% 40 documents, {corpus.num_tokens:,} tokens \([\d,]+/s\) 0:00:00 *", last)


def test_the_command_prepares_the_standard_library_without_datasets_or_torch(tmp_path):
    """A fresh interpreter that asserts which modules were not imported."""
    program = (
        "import sys; from data.prepare import main\n"
        "if __name__ == '__main__':\n"
        "    main(sys.argv[1:])\n"
        "    assert not {'torch', 'datasets', 'pyarrow', 'transformers'} & set(sys.modules)\n"
    )
    (tmp_path / "program.py").write_text(program)
    arguments = ["--source", "stdlib", "--output", "std", "--train_vocab_size", "300", "--train_bytes", "20000"]
    subprocess.run(
        [sys.executable, "program.py", *arguments, "--max_documents", "5", "--workers", "1"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
        check=True,
        capture_output=True,
    )
    expected = [document.content.decode() for document in Source(["stdlib"], max_documents=5).documents()]
    assert _documents(tmp_path / "std") == expected


def test_the_standard_library_is_a_sorted_list_of_modules_without_tests():
    origins = [document.origin for document in Source(["stdlib"]).documents()]
    assert origins == sorted(origins)
    assert any(origin.endswith("/argparse.py") for origin in origins)
    assert not any("/test/" in origin or "site-packages" in origin for origin in origins)


def test_a_saved_dataset_is_read_by_split_and_column(tmp_path, datasets):
    parts = {
        "train": datasets.Dataset.from_dict({"body": TEXTS[:3]}),
        "test": datasets.Dataset.from_dict({"body": TEXTS[3:5]}),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "dataset")
    source = Source([str(tmp_path / "dataset")], text_key="body", split="test")
    assert _read(source) == TEXTS[3:5]
    assert source.weight() == sum(document.weight for document in source.documents()) == 2
    parts["train"].save_to_disk(tmp_path / "single")
    assert _read(Source([str(tmp_path / "single")], text_key="body", max_documents=2)) == TEXTS[:2]
    with pytest.raises(DataError, match=r"single has no column of text called text; set --text_key to one of body \("):
        _read(Source([str(tmp_path / "single")]))


def test_a_folder_of_another_format_is_streamed_through_datasets(tmp_path, datasets):
    (tmp_path / "table").mkdir()
    datasets.Dataset.from_dict({"text": TEXTS[:3], "n": [1, 2, 3]}).to_csv(tmp_path / "table" / "table.csv")
    source = Source([str(tmp_path / "table")])
    assert _read(source) == TEXTS[:3]
    assert source.weight() is None


def test_existing_output_is_only_replaced_on_request(tmp_path, capsys, small_command):
    index = tmp_path / "out" / "corpus.idx"
    index.parent.mkdir()
    index.write_text("old")
    assert "corpus.idx exists; choose another --output or add --overwrite" in _error_of(capsys, *small_command)
    assert index.read_text() == "old"
    main([*small_command, "--overwrite"])
    assert _documents(index.with_suffix("")) == TEXTS[:1]


def test_a_crash_while_files_are_replaced_leaves_no_old_index_beside_new_tokens(tmp_path, monkeypatch, small_command):
    main(small_command)

    def crash(_staged: Path, path: Path) -> None:
        raise KeyboardInterrupt(path)

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(SystemExit):
        main([*small_command, "--overwrite"])
    assert (tmp_path / "out" / "corpus.bin").exists()
    assert not (tmp_path / "out" / "corpus.idx").exists()


def test_a_parquet_column_that_is_not_utf_8_is_reported_with_its_row(tmp_path):
    texts = pa.Array.from_buffers(pa.string(), 2, pa.array([b"good", b"\xff"]).buffers())
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    good, bad = Source([str(tmp_path / "a.parquet")]).documents()
    assert text_of(good, "text") == "good"
    with pytest.raises(DataError, match=r"a.parquet:2 is not UTF-8 .*; convert it or leave it out"):
        text_of(bad, "text")


def test_a_second_process_with_the_same_output_is_refused_and_touches_nothing(tmp_path, capsys, small_command):
    with reserved(tmp_path / "new" / "out" / "corpus"):
        pass
    with reserved(tmp_path / "out" / "corpus"):
        assert "out/corpus is being written by another process, which holds" in _error_of(capsys, *small_command)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".corpus.lock"]
    with reserved(tmp_path / "out" / "corpus"):
        pass
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_system_without_locks_is_written_to_and_one_that_cannot_be_is_an_error(tmp_path):
    """No file stands for the lock: it would outlive a process that is killed, and refuse all later ones."""
    (tmp_path / "out").mkdir()
    error = OSError(errno.ENOSYS, "Function not implemented")
    with (
        mock.patch("fcntl.flock", side_effect=error),
        reserved(tmp_path / "out" / "corpus"),
        reserved(tmp_path / "out" / "corpus"),
    ):
        pass
    error = OSError(errno.EROFS, "Read-only file system")
    with mock.patch.object(FileLock, "acquire", side_effect=error), pytest.raises(OSError, match="Read-only"):
        reserved(tmp_path / "out" / "corpus").__enter__()


def test_a_full_disk_is_reported_in_one_line_and_nothing_is_left(tmp_path, capsys, small_command):
    """The system limits the size of a file to less than the tokenizer's, which is written first."""
    with files_of_at_most(100):
        message = _error_of(capsys, *small_command)
    assert re.search(r"cannot write or read .*corpus.* \(File too large\); make room, or choose another", message)
    assert list((tmp_path / "out").iterdir()) == []


def test_ctrl_c_ends_in_one_line_with_the_code_of_an_interrupted_program(tmp_path, monkeypatch, capsys):
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("data.prepare._run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["--source", "stdlib", "--characters", "--output", str(tmp_path / "corpus")])
    assert ended.value.code == 130
    assert (
        capsys.readouterr().err
        == f"data.prepare: interrupted, {tmp_path / 'corpus'} is not complete; the same command goes on\n"
    )


class KilledWorker:
    """An encoder whose process is killed, as by the kernel if there is no memory."""

    def __call__(self, batch: list[Document]) -> Encoded:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_worker_that_is_killed_is_reported():
    documents = [Document("a.txt", 1, "text", 4)]
    with pytest.raises(DataError, match=r"^one of 2 workers was killed, probably out of memory; lower --workers$"):
        list(encode_in_order(KilledWorker(), documents, 2))


@pytest.mark.parametrize(("package", "source"), [("pyarrow", "a.parquet"), ("datasets", "user/corpus")])
def test_a_package_that_is_missing_is_named(package, source, tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"{source}.* needs .*{package}.*: pip install {package}$"):
        list(Source([source]).documents())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", "a.txt is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 1}\n', "a.jsonl:2 has no text under --text_key text; its keys are text"),
        ("a.jsonl", b'{"text": "a"}\n\n{"a\\nb": "a", "n": 1}\n', "a.jsonl:3 has no text .*; its keys are a b, n"),
        ("a\nb.jsonl", b'{"text": "a"}\n[1]\n', "a b.jsonl:2 is a JSON list; every line must be one JSON object"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"\n', r"a.jsonl:1 is not JSON \(Expecting ',' delimiter, column 13\)"),
        ("a.jsonl", b'{"n": ' + b"1" * 4301 + b"}", r"a.jsonl:1 cannot be read as JSON \(Exceeds the limit"),
        ("a.jsonl", b"[" * 10**5 + b"]" * 10**5, r"a.jsonl:1 cannot be read as JSON \(maximum recursion"),
        ("a.jsonl.gz", gzip.compress(mtime=0, data=b'{"text": "a"}\n')[:-4], "cannot read .*a.jsonl.gz"),
        ("a.jsonl.gz", b"no gzip", "cannot read .*a.jsonl.gz"),
        ("a.parquet", b"PAR1 and nothing more", "cannot read .*a.parquet as Parquet"),
    ],
)
def test_a_source_that_cannot_be_read_is_reported_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        [text_of(document, "text") for document in Source([str(tmp_path / name)]).documents()]
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "a.txt/corpus"], r"cannot write or read .*a.txt \(File exists\); make room, or"),
        (["--output", ".."], "--output .. names no files; give the beginning of their names"),
        (["--source", "number.parquet"], r"number.parquet has no column of text .*one of text \(int64\)"),
        (["--source", "body.parquet"], r"body.parquet has no column of text called text; .*one of body \(string\)"),
        (["--source", "empty.txt"], "holds no text"),
        (["--source", "missing.txt"], "--source missing.txt: no such file"),
        (["--source", "*.nothing"], r"--source \*.nothing: no such file"),
        (["--source", "dataset", "--split", "valid"], "--split valid is not among its splits train"),
        (["--workers", "0"], "--workers=0 must be 1 or more, and at most"),
        (["--part", "1/2"], "--part needs a --tokenizer that all parts have; make one with --tokenizer_only"),
        (["--part", "3/2"], "--part=3/2 is no part from 1/N to N/N"),
        (["--part", "a"], "--part=a is no K/N"),
        (["--max_documents", "9223372036854775808"], "--max_documents=9223372036854775808 must be 1 or more, and at"),
    ],
)
def test_options_that_cannot_be_followed_are_reported_in_one_line_and_leave_nothing(
    tmp_path, monkeypatch, capsys, datasets, options, message
):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(TEXTS[0])
    Path("empty.txt").touch()
    parquet.write_table(pa.table({"body": ["a"]}), "body.parquet")
    parquet.write_table(pa.table({"text": [1]}), "number.parquet")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk("dataset")
    arguments = _command("a.txt", "corpus", "--train_vocab_size", "257")
    assert re.search(message, _error_of(capsys, *arguments, *options))
    assert list(tmp_path.glob("*corpus*")) == []
