"""Fixtures that write a corpus of given documents with IndexedWriter."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from data.staging import IndexedWriter

WriteCorpus = Callable[..., str]


@pytest.fixture
def write_corpus(tmp_path: Path) -> WriteCorpus:
    def write(documents: Sequence[Sequence[int]], name: str = "corpus", vocab_dtype: str = "u2") -> str:
        prefix = str(tmp_path / name)
        with IndexedWriter(prefix, np.dtype(vocab_dtype)) as writer:
            tokens = np.array([token for document in documents for token in document])
            writer.add(tokens, np.array([len(document) for document in documents]))
        return prefix

    return write


@pytest.fixture
def counting_corpus(write_corpus: WriteCorpus) -> str:
    """Write 23 documents of 1 to 40 tokens. Each token is its own position in the file."""
    lengths = np.random.default_rng(0).integers(1, 41, 23)
    ends = np.cumsum(lengths)
    return write_corpus([range(end - length, end) for end, length in zip(ends, lengths, strict=True)])
