"""The .bin/.idx pair and the packing of samples, compared with those of megatron-core 0.16.1."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data.epochs import Stream
from data.indexed import IndexedDataset
from data.prepare import main
from data.staging import IndexedWriter

megatron = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="needs pip install megatron-core==0.16.1", exc_type=ImportError
)
helpers = pytest.importorskip(
    "megatron.core.datasets.helpers", reason="needs its compiled helpers", exc_type=ImportError
)
pytestmark = pytest.mark.oracle

DOCUMENTS = [np.random.default_rng(i).integers(0, 60000, 1 + 37 * i % 101) for i in range(50)]


def test_megatron_reads_what_prepare_writes(tmp_path: Path):
    texts = [f"document {i} " * (i % 9 + 1) for i in range(60)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prefix = str(tmp_path / "prepared")
    main(["--source", str(tmp_path / "corpus.jsonl"), "--output", prefix, "--train_vocab_size", "300"])
    theirs = megatron.IndexedDataset(prefix)
    ours = IndexedDataset(prefix)
    assert len(theirs) == len(ours) == 60
    assert all(np.array_equal(theirs[i], ours[i]) and theirs[i].dtype == ours[i].dtype for i in range(60))
    assert np.array_equal(theirs.get(7, offset=1, length=2), ours[7][1:3])
    assert np.array_equal(theirs.sequence_lengths, ours.sequence_lengths)
    assert np.array_equal(theirs.document_indices, ours.document_indices)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_both_writers_write_the_same_bytes(tmp_path: Path, dtype: type[np.number]):
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    with IndexedWriter(tmp_path / "ours", np.dtype(dtype)) as writer:
        writer.add(np.concatenate(DOCUMENTS), np.array([len(document) for document in DOCUMENTS]))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_we_read_documents_of_several_sequences_that_megatron_writes(tmp_path: Path):
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for first, second in zip(DOCUMENTS[::2], DOCUMENTS[1::2], strict=True):
        builder.add_document(torch.from_numpy(np.concatenate([first, second])), [len(first), len(second)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = IndexedDataset(tmp_path / "theirs")
    assert [sequence.tolist() for sequence in ours] == [document.tolist() for document in DOCUMENTS]
    assert ours.document_indices.tolist() == list(range(0, 51, 2))


@pytest.mark.parametrize("seq_length", [1, 16, 333])
def test_documents_in_one_order_are_cut_into_the_same_samples(seq_length: int):
    lengths = np.array([len(document) for document in DOCUMENTS], dtype=np.int32)
    order = Stream(lengths, seq_length, masks_documents=False).build(seed=1, epoch=0)
    document_order = order.document_order.astype(np.int32)
    theirs = helpers.build_sample_idx(lengths, document_order, seq_length, 1, int(lengths.sum()))
    assert np.array_equal(theirs, order.sample_starts)
