"""The .bin/.idx pair, byte for byte."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.errors import DataError
from data.indexed import IndexedDataset, check_index
from data.sidecar import Sidecar
from data.staging import IndexedWriter, token_dtype

HEADER_BYTES = 34


def test_two_documents_give_the_bytes_computed_by_hand(write_corpus):
    prefix = write_corpus([[1, 2, 258], [7]])
    assert Path(prefix + ".bin").read_bytes() == bytes.fromhex("0100 0200 0201 0700")
    assert Path(prefix + ".idx").read_bytes() == bytes.fromhex(
        "4d4d4944494458 0000"  # MMIDIDX and two zeros
        "0100000000000000"  # version
        "08"  # u16
        "0200000000000000 0300000000000000"  # sequences, document indices
        "03000000 01000000"  # lengths in tokens
        "0000000000000000 0600000000000000"  # starts in bytes
        "0000000000000000 0100000000000000 0200000000000000"  # first sequence of each document, and the end
    )


@pytest.mark.parametrize(("vocab_size", "name"), [(65499, "<u2"), (65500, "<i4")])
def test_tokens_take_two_bytes_below_a_vocabulary_of_65500_and_four_from_there(vocab_size, name):
    assert token_dtype(vocab_size) == np.dtype(name)


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=20).filter(any), st.integers(1, 20)
)
def test_what_is_written_in_batches_of_any_size_is_read_back(tmp_path_factory, documents, batch):
    prefix = tmp_path_factory.mktemp("indexed") / "corpus"
    with IndexedWriter(prefix, np.dtype("i4")) as writer:
        for first in range(0, len(documents), batch):
            some = documents[first : first + batch]
            writer.add(
                np.array([token for document in some for token in document], dtype=np.int64),
                np.array([len(document) for document in some]),
            )
    dataset = IndexedDataset(prefix)
    assert [tokens.tolist() for tokens in dataset] == documents
    assert dataset.sequence_lengths.tolist() == [len(document) for document in documents]
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))
    assert dataset.num_tokens == sum(map(len, documents))


def test_a_document_is_a_read_only_view_of_the_map(write_corpus):
    dataset = IndexedDataset(write_corpus([[1, 2], [3, 4, 5, 6]]))
    document = dataset[1]
    assert document.tolist() == [3, 4, 5, 6]
    assert np.shares_memory(document, dataset[1])
    assert not document.flags.writeable
    with pytest.raises(IndexError):
        dataset[2]


def test_an_index_with_modes_opens(write_corpus):
    prefix = write_corpus([[1], [2]])
    with open(prefix + ".idx", "ab") as file:
        file.write(bytes(2))
    assert len(IndexedDataset(prefix)) == 2


def test_a_writer_that_fails_leaves_no_index(tmp_path):
    writer, files = IndexedWriter(tmp_path / "corpus", np.dtype("u2")), len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyError), writer:
        raise KeyError
    assert len(os.listdir("/proc/self/fd")) == files
    with pytest.raises(DataError, match=r"corpus.idx does not exist; data.path takes the common prefix"):
        IndexedDataset(tmp_path / "corpus")


def _overwrite(path: str, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def test_a_missing_bin_is_named(write_corpus):
    prefix = write_corpus([[1, 2, 3]])
    Path(prefix + ".bin").unlink()
    with pytest.raises(DataError, match=r"corpus.bin does not exist"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"X", r"corpus.idx \(82 bytes\) does not start with a 34-byte MMIDIDX header"),
        (9, struct.pack("<Q", 2), "has version 2 and dtype code 8, expected 1"),
        (17, b"\x07", "describes numbers of type float32, tokens are integers"),
        (18, struct.pack("<Q", 3), "has 82 bytes, its header describes 94"),
        (74, struct.pack("<Q", 5), "its last document index is not its 2 sequences"),
        (42, struct.pack("<qq", 0, 0), "corpus.bin has 8 bytes, its index describes 2"),
    ],
)
def test_a_damaged_index_is_reported_with_the_expected_values(write_corpus, offset, content, message):
    prefix = write_corpus([[1, 2, 258], [7]])
    _overwrite(prefix + ".idx", offset, content)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize("block", [1, 2, 100])
@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (34, struct.pack("<i", -1), "sequence 0 has a length of -1 tokens"),
        (38, struct.pack("<i", 3), "sequence 2 starts at byte 8, the one before ends at 12"),
        (46, struct.pack("<q", 2), "sequence 0 starts at byte 2, the one before ends at 0"),
        (54, struct.pack("<q", 2**63 - 2), "sequence 1 starts at byte 9223372036854775806, the one before ends at 6"),
        (70, struct.pack("<q", 1), "document 0 begins with sequence 1, not with sequence 0"),
        (78, struct.pack("<q", 2**40), "document 2 begins with sequence 2, before the document ahead of it"),
        (86, struct.pack("<q", -1), "document 2 begins with sequence -1, before the document ahead of it"),
    ],
)
def test_the_inside_of_an_index_is_checked(write_corpus, monkeypatch, block, offset, content, message):
    monkeypatch.setattr("data.indexed.BLOCK", block)
    prefix = write_corpus([[1, 2, 258], [7], [8, 9]])
    check_index(IndexedDataset(prefix))
    _overwrite(prefix + ".idx", offset, content)
    with pytest.raises(DataError, match=rf"corpus.idx is damaged: {message}; copy or prepare it again"):
        check_index(IndexedDataset(prefix))


def test_an_empty_document_is_no_damage_and_a_negative_length_after_it_is(write_corpus):
    prefix = write_corpus([[], [7], [8, 9]])
    check_index(IndexedDataset(prefix))
    _overwrite(prefix + ".idx", 38, struct.pack("<i", -1))
    with pytest.raises(DataError, match="sequence 1 has a length of -1 tokens"):
        check_index(IndexedDataset(prefix))


def test_an_index_that_is_not_the_one_that_was_written_is_noticed(write_corpus):
    """Two lengths and a start are changed together, so that the arrays are still consistent."""
    prefix = write_corpus([[1, 2, 258], [7]])
    checksum = zlib.crc32(Path(prefix + ".idx").read_bytes())
    facts = {"vocab_size": 300, "eod": 0, "tokenizer": "trained", "source": ["x"]}
    Sidecar(**facts, documents=2, tokens=4, checksums={".idx": checksum}).save(prefix)
    check_index(IndexedDataset(prefix))
    _overwrite(prefix + ".idx", 34, struct.pack("<iiqq", 2, 2, 0, 4))
    with pytest.raises(DataError, match=r"corpus.idx is damaged or belongs to another corpus: its CRC-32 is \d+"):
        check_index(IndexedDataset(prefix))
    Sidecar(**facts, documents=2, tokens=5).save(prefix)
    with pytest.raises(DataError, match=r"corpus.idx holds 4 tokens, .*corpus.json says 5: they belong to different"):
        check_index(IndexedDataset(prefix))


def test_an_index_without_documents_is_refused(write_corpus):
    with pytest.raises(DataError, match="holds 0 documents"):
        IndexedDataset(write_corpus([]))
    with pytest.raises(DataError, match=r"corpus.bin has 0 bytes, its index describes 0"):
        IndexedDataset(write_corpus([[], []]))


def test_the_tokens_are_on_the_disk_before_the_index_is_begun(write_corpus, tmp_path, monkeypatch):
    on_disk: list[dict[str, int]] = []

    def sync(_: int) -> None:
        on_disk.append({path.name: path.stat().st_size for path in tmp_path.iterdir()})

    monkeypatch.setattr("os.fsync", sync)
    write_corpus([[1, 2, 258], [7]])
    assert on_disk == [{"corpus.bin": 8}, {"corpus.bin": 8, "corpus.idx": 82}]
