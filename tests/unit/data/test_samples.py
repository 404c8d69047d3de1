"""Packed samples: tokens, order, split and cache folder."""

import os
from pathlib import Path

import numpy as np
import pytest

from data.blend import open_samples
from data.epochs import Stream
from data.errors import DataError
from data.indexed import IndexedDataset
from data.samples import MAX_EPOCHS_AHEAD, PARTS, PackedSamples, SampleOptions, split_documents
from data.staging import IndexedWriter

SEQ_LENGTH = 8


def _packed(prefix: str, **changes) -> PackedSamples:
    dataset = IndexedDataset(prefix)
    return PackedSamples(
        dataset, range(len(dataset)), SampleOptions(**{"seq_length": SEQ_LENGTH, "seed": 3, **changes})
    )


def test_a_sample_is_the_tokens_that_a_walk_through_the_epoch_finds(counting_corpus):
    samples = _packed(counting_corpus)
    dataset = IndexedDataset(counting_corpus)
    for epoch in range(3):
        order = Stream(dataset.sequence_lengths, SEQ_LENGTH, masks_documents=False).build(3, epoch)
        stream = [token for document in order.document_order for token in dataset[document].tolist()]
        for index, number in enumerate(order.shuffle.tolist()):
            expected = stream[number * SEQ_LENGTH : (number + 1) * SEQ_LENGTH + 1]
            assert samples[epoch * samples.samples_per_epoch + index].tolist() == expected


def test_the_place_of_a_sample_is_the_document_of_its_first_token(counting_corpus):
    samples = _packed(counting_corpus)
    dataset = IndexedDataset(counting_corpus)
    for i in range(samples.samples_per_epoch):
        document = int(samples.place(i).removeprefix(f"{counting_corpus}.bin, document "))
        assert samples[i][0] in dataset[document]


def test_the_split_is_consecutive_and_complete():
    assert split_documents(1000, [0.98, 0.01, 0.01]) == {
        "train": range(980),
        "validation": range(980, 990),
        "test": range(990, 1000),
    }
    assert split_documents(7, [2, 1, 0]) == {"train": range(5), "validation": range(5, 7), "test": range(7, 7)}


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.6, -0.1], [0, 0, 0]])
def test_a_wrong_split_is_reported(weights):
    with pytest.raises(DataError, match=r"data.split=\[.*must be three weights"):
        split_documents(10, weights)


def test_parts_share_no_document(counting_corpus):
    parts = [open_samples(counting_corpus, part, split=[2, 1, 1], seq_length=SEQ_LENGTH, seed=3) for part in PARTS]
    seen = [{token for i in range(40) for token in part[i].tolist()} for part in parts]
    assert sum(map(len, seen)) == len(set.union(*seen))


def test_a_sequence_longer_than_the_data_is_reported_with_both_numbers(write_corpus):
    prefix = write_corpus([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert _packed(prefix, seq_length=7).samples_per_epoch == 1
    with pytest.raises(DataError, match=r"2 documents with 8 tokens are fewer than model.seq_length \+ 1 = 9; lower"):
        _packed(prefix, seq_length=8)
    with pytest.raises(DataError, match=r"has 2 documents, .*=\[1, 0, 0\] leaves 0 for test; change data.split"):
        open_samples(prefix, "test", split=[1, 0, 0], seq_length=1, seed=1)
    single = write_corpus([[1] * 40], "single")
    with pytest.raises(DataError, match=r"has 1 documents, of which .* leaves 0 for validation"):
        open_samples(single, "validation", split=[0.98, 0.01, 0.01], seq_length=1, seed=1)


def test_documents_of_one_token_have_nothing_to_predict_if_they_are_kept_apart(write_corpus):
    prefix = write_corpus([[1]] * 40)
    assert _packed(prefix).samples_per_epoch == 4
    with pytest.raises(DataError, match=r"40 documents with 40 tokens have no prediction .*=false"):
        _packed(prefix, masks_documents=True)


@pytest.fixture
def million_documents(tmp_path: Path) -> str:
    prefix = str(tmp_path / "million")
    with IndexedWriter(prefix, np.dtype("u2")) as writer:
        writer.add(np.arange(1 << 20) % 60000, np.ones(1 << 20, dtype=np.int32))
    return prefix


def test_the_cache_is_built_for_the_epochs_asked_for_and_then_only_read(million_documents, monkeypatch):
    samples = _packed(million_documents)
    samples.build_cache(samples.samples_per_epoch - 1, 2)
    files = {path: path.stat().st_mtime_ns for path in Path(million_documents + ".cache").iterdir()}
    assert {path.name.rpartition("epoch_")[2].partition(".")[0] for path in files} == {"0", "1"}
    monkeypatch.setattr(Stream, "build", lambda *_: pytest.fail("must not build"))
    reader = _packed(million_documents)
    assert [reader[i].tolist() for i in (0, samples.samples_per_epoch)] == [
        samples[i].tolist() for i in (0, samples.samples_per_epoch)
    ]
    assert files == {path: path.stat().st_mtime_ns for path in Path(million_documents + ".cache").iterdir()}


def test_a_change_of_anything_that_an_order_depends_on_names_other_files(counting_corpus, monkeypatch):
    monkeypatch.setattr("data.samples.MIN_CACHED_ENTRIES", 1)
    for changes in ({}, {"seq_length": 9}, {"seed": 4}):
        _packed(counting_corpus, **changes)[0]
    PackedSamples(IndexedDataset(counting_corpus), range(1, 23), SampleOptions(SEQ_LENGTH, seed=3))[0]
    os.utime(counting_corpus + ".idx", ns=(8, 8))
    _packed(counting_corpus)[0]
    assert len(list(Path(counting_corpus + ".cache").glob("*.json"))) == 4


def test_corpora_of_equal_name_sizes_and_times_have_orders_of_their_own(tmp_path, write_corpus, monkeypatch):
    monkeypatch.setattr("data.samples.MIN_CACHED_ENTRIES", 1)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = write_corpus([[1] * 9, [2]] * 4, "a/corpus"), write_corpus([[1], [2] * 9] * 4, "b/corpus")
    for prefix in (first, second):
        os.utime(prefix + ".idx", ns=(0, 0))  # as images of containers have
        shared, own = _packed(prefix, cache_dir=tmp_path / "cache"), _packed(prefix)
        assert [shared[i].tolist() for i in range(4)] == [own[i].tolist() for i in range(4)]


def test_only_the_rank_that_builds_the_cache_compares_its_checksums(counting_corpus, monkeypatch):
    monkeypatch.setattr("data.samples.MIN_CACHED_ENTRIES", 1)
    whole = _packed(counting_corpus)
    assert whole[0].tolist() == _packed(counting_corpus, checks_cache=False)[0].tolist()
    (checksums,) = Path(counting_corpus + ".cache").glob("*.json")
    checksums.write_text("{}")
    assert _packed(counting_corpus, checks_cache=False)[0].tolist() == whole[0].tolist()
    with pytest.raises(DataError, match="cannot read the sample order"):
        _packed(counting_corpus)[0]
    with pytest.raises(DataError, match="cannot read the sample order"):
        _packed(counting_corpus, checks_cache=False).build_cache(0, 1)


def test_a_run_of_endless_length_caches_the_first_epochs_only(million_documents, monkeypatch):
    samples, built = _packed(million_documents), []
    monkeypatch.setattr(PackedSamples, "_order_of", lambda self, epoch, checks: built.append(epoch))
    samples.build_cache(3 * samples.samples_per_epoch, 10**18)
    assert built == list(range(3, 3 + MAX_EPOCHS_AHEAD))
    built.clear()
    samples.build_cache(0, samples.samples_per_epoch)
    assert built == [0]


def test_a_small_order_is_not_written(counting_corpus):
    _packed(counting_corpus).build_cache(0, 100)
    assert not Path(counting_corpus + ".cache").exists()
