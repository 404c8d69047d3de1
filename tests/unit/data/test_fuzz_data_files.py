"""Damaged data files: a reader gets what it would get from whole files, or a DataError of one line that names a file.

Files are damaged as disks, copies and editors do it: bytes change, are lost or repeated, and numbers become extreme.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from data.batches import BatchLoader
from data.blend import open_samples
from data.check import check_corpus
from data.chosen_tokenizers import named_tokenizer, train_tokenizer
from data.errors import DataError
from data.prepare import main
from data.sidecar import Sidecar
from data.sources import Source, text_of
from data.staging import IndexedWriter
from data.tokenizer import load_tokenizer
from tests.fuzz import DAMAGE, DAMAGE_OF_JSON, Damage, fuzzed, result_unless_refused, run_examples

TEXTS = [f"document {i} says {'again ' * (i % 7)}Ψ{i * i}\n" for i in range(40)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the prefix of a corpus that `data.prepare` wrote."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prefix = folder / "corpus"
    main(["--source", f"{folder}/texts.jsonl", "--output", str(prefix), "--train_vocab_size", "280", "--workers", "1"])
    return prefix


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the prefix of a pair without PREFIX.json, as Megatron-LM writes it. Two documents are empty."""
    prefix = tmp_path_factory.mktemp("foreign") / "corpus"
    lengths = np.array([*range(1, 20), 0, 0, *range(19, 0, -1)])
    with IndexedWriter(prefix, np.dtype("u2")) as writer:
        writer.add(np.arange(lengths.sum()) % 280, lengths)
    return prefix


def _read(prefix: Path) -> tuple[Any, ...]:
    """Return all that training reads of a corpus. Every part of the samples is read, and of two epochs."""
    samples = open_samples(str(prefix), split=[1, 0, 0], seq_length=16, seed=1)
    samples.build_cache(0, 90)
    loader = BatchLoader(samples, micro_batch_size=90, data_rank=0, data_size=1, vocab_size=280)
    (batch,) = next(loader.steps([(0, 90)]))
    if not Sidecar.path(prefix).is_file():
        return (batch.tolist(),)
    return batch.tolist(), Sidecar.load(prefix), load_tokenizer(prefix).decode(range(280))


def _check_damage(whole: Path, folder: Path, suffix: str, read: Callable[[Path], Any], damage: Damage) -> None:
    """Read a copy of the files with one damaged; compare with what is read of the whole files, or with the error."""
    for file in whole.parent.glob(f"{whole.name}.*"):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    copy = folder / whole.name
    damaged = Path(f"{copy}{suffix}")
    damaged.write_bytes(damage(damaged.read_bytes()))
    found = result_unless_refused(lambda: read(copy), DataError, copy)
    assert found is None or found == read(whole)


@fuzzed(few=40, many=1500)
@pytest.mark.parametrize("suffix", [".idx", ".json", ".tokenizer.json"])
def test_a_prepared_corpus_is_read_as_it_was_written_or_refused(num_examples, suffix, prepared, tmp_path):
    run_examples(num_examples, lambda damage: _check_damage(prepared, tmp_path, suffix, _read, damage), DAMAGE)


@fuzzed(few=60, many=1500)
def test_an_index_of_another_program_is_read_as_it_was_written_or_refused(num_examples, foreign, tmp_path):
    run_examples(num_examples, lambda damage: _check_damage(foreign, tmp_path, ".idx", _read, damage), DAMAGE)


@fuzzed(few=20, many=500)
def test_the_check_of_a_corpus_finds_every_change_of_its_tokens(num_examples, prepared, tmp_path):
    def check(prefix: Path) -> bytes:
        check_corpus(str(prefix))
        return prefix.with_suffix(".bin").read_bytes()

    run_examples(num_examples, lambda damage: _check_damage(prepared, tmp_path, ".bin", check, damage), DAMAGE)


@fuzzed(few=30, many=600)
def test_a_cached_order_is_read_as_it_was_written_or_refused(num_examples, foreign, tmp_path, monkeypatch):
    monkeypatch.setattr("data.samples.MIN_CACHED_ENTRIES", 1)
    cache = tmp_path / "cache"

    def read() -> list[list[int]]:
        samples = open_samples(str(foreign), split=[1, 0, 0], seq_length=16, seed=1, cache_dir=cache)
        return [samples[i].tolist() for i in range(30)]

    expected = read()
    files = {path: path.read_bytes() for path in sorted(cache.iterdir())}

    def check(path: Path, damage: Damage) -> None:
        for file, content in files.items():
            file.write_bytes(damage(content) if file == path else content)
        assert result_unless_refused(read, DataError, f"delete {cache}") in (None, expected)

    run_examples(num_examples, check, st.sampled_from(list(files)), DAMAGE)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of every kind of text, and a tokenizer."""
    folder = tmp_path_factory.mktemp("sources")
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "a.txt").write_text("".join(TEXTS))
    parquet.write_table(pa.table({"text": TEXTS, "id": range(len(TEXTS))}), folder / "a.parquet")
    return folder


@fuzzed(few=25, many=500)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet"])
def test_a_damaged_source_is_read_or_refused(num_examples, name, sources, tmp_path):
    """Text is not protected: what a change turns into another text is read as that."""

    def check(damage: Damage) -> None:
        (tmp_path / name).write_bytes(damage((sources / name).read_bytes()))
        documents = islice(Source([str(tmp_path / name)]).documents(), 1000)
        result_unless_refused(lambda: [text_of(document, "text") for document in documents], DataError, name)

    run_examples(num_examples, check, DAMAGE)


@fuzzed(few=4, many=500)
@pytest.mark.parametrize("name", ["dataset_info.json", "state.json", "data-00000-of-00001.arrow"])
def test_a_damaged_folder_of_datasets_is_read_or_refused(num_examples, name, tmp_path):
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": TEXTS, "id": range(len(TEXTS))}).save_to_disk(str(folder))
    content = (folder / name).read_bytes()

    def read() -> list[str]:
        return [text_of(document, "text") for document in islice(Source([str(folder)]).documents(), 1000)]

    def check(damage: Damage) -> None:
        (folder / name).unlink()  # it may still be mapped to memory
        (folder / name).write_bytes(damage(content))
        result_unless_refused(read, DataError, folder)

    run_examples(num_examples, check, DAMAGE)


def tokenizer_of_bytes() -> Backend:
    return Backend.from_str(train_tokenizer(TEXTS, 280).text)


def tokenizer_of_words() -> Backend:
    words = {word: number for number, word in enumerate(["<unk>", "</s>", *sorted({*" ".join(TEXTS).split()})])}
    backend = Backend(models.WordPiece(words, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.BertNormalizer(), normalizers.Replace(Regex("a+"), "a")])
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    backend.add_special_tokens(["</s>"])
    return backend


def tokenizer_of_pieces() -> Backend:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((each, -2.0) for each in sorted({*"".join(TEXTS)}))]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    backend.enable_truncation(8)
    backend.enable_padding(length=12)
    return backend


@fuzzed(few=20, many=500)
@pytest.mark.parametrize("make", [tokenizer_of_bytes, tokenizer_of_words, tokenizer_of_pieces])
def test_a_damaged_tokenizer_is_read_or_refused(num_examples, make, tmp_path):
    path, content = tmp_path / "tokenizer.json", make().to_str().encode()

    def read() -> None:
        tokenizer = named_tokenizer(str(tmp_path), bos_token="none")
        tokenizer.decode(tokenizer.encode("document 3 says again"))
        tokenizer.save(path)

    def check(damage: Damage) -> None:
        path.write_bytes(damage(content))
        result_unless_refused(read, DataError, "tokenizer")

    run_examples(num_examples, check, DAMAGE_OF_JSON)
