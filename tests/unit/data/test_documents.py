"""Samples and batches of documents that are kept apart."""

import numpy as np
import pytest
import torch

from data.batches import BatchLoader
from data.blend import BlendedSamples, open_samples
from data.documents import NOT_COUNTED, DocumentBatch, joined_apart, packed_apart
from data.errors import DataError
from data.indexed import IndexedDataset


def test_the_stream_counts_all_tokens_but_the_first_of_each_document():
    tokens, targets, positions = joined_apart([np.array([1, 2, 3]), np.array([], int), np.array([4]), np.array([5, 6])])
    assert tokens.tolist() == [1, 2, 3, 4, 5]
    assert targets.tolist() == [2, 3, NOT_COUNTED, NOT_COUNTED, 6]
    assert positions.tolist() == [0, 1, 2, 0, 0]
    tokens, targets, positions = joined_apart([np.array([1, 2]), np.array([3])])
    assert (tokens.tolist(), targets.tolist(), positions.tolist()) == ([1, 2], [2, NOT_COUNTED], [0, 1])


def test_a_packed_sample_ends_with_padding_that_is_a_document_of_its_own():
    tokens, targets, positions = packed_apart([np.array([1, 2, 3]), np.array([4, 5])], seq_length=5)
    assert tokens.tolist() == [1, 2, 4, 0, 0]
    assert targets.tolist() == [2, 3, 5, NOT_COUNTED, NOT_COUNTED]
    assert positions.tolist() == [0, 1, 0, 0, 1]


def test_documents_kept_apart_change_no_token_of_the_stream(counting_corpus):
    options = {"split": [1, 0, 0], "seq_length": 8, "seed": 3}
    plain, apart = (
        open_samples(counting_corpus, **options),
        open_samples(counting_corpus, masks_documents=True, **options),
    )
    dataset = IndexedDataset(counting_corpus)
    first_tokens = {dataset[number][0] for number in range(len(dataset))}
    for i in range(60):
        (tokens, targets, positions), expected = apart[i], plain[i]
        assert tokens.tolist() == expected[:-1].tolist()
        starts_next = np.isin(expected[1:], list(first_tokens))
        assert targets.tolist() == np.where(starts_next, NOT_COUNTED, expected[1:]).tolist()
        assert (positions == 0).tolist() == [True, *starts_next[:-1]]


def loader(samples, **changes) -> BatchLoader:
    return BatchLoader(samples, **{"micro_batch_size": 2, "data_rank": 0, "data_size": 1, "vocab_size": 999} | changes)


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_a_run_resumes_in_the_middle_with_the_same_batches(counting_corpus, packing):
    def samples():
        options = {"split": [1, 0, 0], "seq_length": 8, "seed": 3, "packing": packing, "masks_documents": True}
        return open_samples(counting_corpus, **options)

    plan = [(4 * step, 4) for step in range(40)]
    whole = list(loader(samples()).steps(plan))
    resumed = [*loader(samples()).steps(plan[:23]), *loader(samples()).steps(plan[23:])]
    for step, again in zip(whole, resumed, strict=True):
        for batch, same in zip(step, again, strict=True):
            assert all(one.equal(other) for one, other in zip(vars(batch).values(), vars(same).values(), strict=True))
    batch = whole[0][0]
    assert batch.tokens.shape == batch.targets.shape == batch.positions.shape == (2, 8)
    assert batch.starts.dtype == torch.int32
    assert batch.starts.tolist() == [*np.flatnonzero(batch.positions.flatten() == 0), 16]


def test_a_batch_moves_as_a_tensor_does():
    batch = DocumentBatch.of(np.stack([packed_apart([np.array([1, 2, 3])], 4)] * 2))
    assert {tensor.device.type for tensor in vars(batch.to("meta", non_blocking=True)).values()} == {"meta"}
    assert batch.starts.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("bad", [[[1, 2, -1]], [[1, -1, 2]], [[-1, 1, 2]], [[1, 2, 999]], [[0, 1, 999]]])
@pytest.mark.parametrize("kind", [{}, {"masks_documents": True}, {"masks_documents": True, "packing": "best_fit"}])
def test_a_token_outside_the_vocabulary_is_reported(write_corpus, bad, kind):
    prefix = write_corpus(bad, vocab_dtype="i4")
    options = {"split": [1, 0, 0], "seq_length": 2, "seed": 3} | kind
    with pytest.raises(DataError, match=r"token id (-1|999) in sample 0 \(.*document 0\) is outside"):
        next(loader(open_samples(prefix, **options), micro_batch_size=1).steps([(0, 1)]))


def test_a_position_beyond_the_vocabulary_is_no_token(write_corpus):
    samples = open_samples(write_corpus([[0, 1, 0, 1, 0]]), split=[1, 0, 0], seq_length=4, seed=3, masks_documents=True)
    ((batch,),) = loader(samples, micro_batch_size=1, vocab_size=2).steps([(0, 1)])
    assert batch.positions.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("masks_documents", [False, True])
def test_a_batch_is_pinned_as_a_whole_on_request(counting_corpus, monkeypatch, masks_documents):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.to("meta"))
    samples = open_samples(counting_corpus, split=[1, 0, 0], seq_length=8, seed=3, masks_documents=masks_documents)
    ((batch,),) = loader(samples, pin_memory=True).steps([(0, 2)])
    tensors = vars(batch).values() if masks_documents else [batch]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_a_blend_has_the_mean_number_of_tokens_of_its_samples():
    class Some:
        def __init__(self, tokens_per_sample):
            self.tokens_per_sample = tokens_per_sample

    assert BlendedSamples([Some(8.0), Some(4.0)], [3, 1]).tokens_per_sample == 7
