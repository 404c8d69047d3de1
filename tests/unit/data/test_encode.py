"""The encoding of documents: batches, the reading ahead, and the processes that encode."""

import os
import signal
from collections.abc import Iterator
from multiprocessing import active_children

import numpy as np
import pytest

from data.encode import BATCHES_AHEAD, Encoded, _batches, encode_in_order
from data.sources import Document


def documents(*sizes: int | None) -> Iterator[Document]:
    return (Document("a.txt", 0, None if size is None else "a" * size, 1) for size in sizes)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([86, 86, 236, 235, 1], [2, 1, 2]),  # 150 + 150 bytes with what is added to each, 300, and 299 + 65
        ([235, 1, 235, 1], [2, 2]),
        ([0, None, 0, None, 0, 0], [5, 1]),  # five times 64 bytes
        ([], []),
    ],
)
def test_a_batch_ends_with_the_document_that_fills_it(monkeypatch: pytest.MonkeyPatch, sizes, expected):
    monkeypatch.setattr("data.encode.BATCH_BYTES", 300)
    assert [len(batch) for batch in _batches(documents(*sizes))] == expected


class StateOfWorker:
    """An encoder that returns the length of the first document, and 1 for each fact that a worker should have."""

    def __call__(self, batch: list[Document]) -> Encoded:
        facts = [signal.getsignal(signal.SIGINT) == signal.SIG_IGN, os.environ["TOKENIZERS_PARALLELISM"] == "false"]
        return Encoded(np.array(facts), np.array([len(str(batch[0].content))]), len(batch))


def test_a_worker_leaves_ctrl_c_to_the_reader_which_reads_a_few_batches_ahead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("data.encode.BATCH_BYTES", 1)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    source = documents(*range(20))
    children = set(active_children())
    encoded = encode_in_order(StateOfWorker(), source, 2)
    first = next(encoded)
    num_read = 20 - len(list(source))
    assert num_read == 1 + 2 * BATCHES_AHEAD
    found = [first, *encoded]
    assert [one.lengths.tolist() for one in found] == [[size] for size in range(num_read)]
    assert all(one.tokens.all() for one in found)
    assert set(active_children()) == children
