"""The encoding of documents as tokens, in worker processes.

    one reader --batches of documents--> workers --tokens, in the order read--> one consumer

The reader reads at most a few batches for each worker ahead, so memory does not grow with the corpus. Batches are
yielded in the order in which they were read, so the result does not depend on the number of workers.
"""

import os
import signal
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from multiprocessing import get_context

import numpy as np

from data.errors import DataError
from data.sources import Document, text_of
from data.staging import token_dtype
from data.tokenizer import Tokenizer

BATCH_BYTES = 512 << 10
DOCUMENT_OVERHEAD_BYTES = 64  # added to each document's size, so that a batch of empty documents ends too
MAX_TEMPORARY_FOLDER = 60  # bytes of a path: a socket in a folder in it may have 107
MAX_REJECTED_CHARACTERS = 10_000  # of a rejected document that are kept
BATCHES_AHEAD = 4  # for each worker, so that all others are busy while one encodes a large document


@dataclass(frozen=True)
class Encoded:
    """The tokens of a batch of documents, each with the tokens that begin and end one. Empty documents are left out."""

    tokens: np.ndarray  # of all documents, joined
    lengths: np.ndarray  # in tokens, of each document
    weight: float  # of the batch, for the progress bar: the sum of `Document.weight`
    num_empty: int = 0
    rejected: list[dict[str, str]] = field(default_factory=list)  # place, reason and text of what is wrong

    @property
    def num_read(self) -> int:
        """The number of documents of the batch, those that are left out included."""
        return len(self.lengths) + self.num_empty + len(self.rejected)


@dataclass(frozen=True)
class Encoder:
    """The function that workers call. It is pickled with every batch, so it holds the tokenizer's path only."""

    tokenizer_file: str
    eod: int
    text_key: str
    bos: int | None = None
    skips_errors: bool = False

    def __call__(self, documents: list[Document]) -> Encoded:
        tokenizer = _tokenizer_of_this_process(self.tokenizer_file, self.eod, self.bos)
        found, rejected = [], []
        try:
            found = tokenizer.encode_batch([text_of(document, self.text_key) for document in documents])
        except DataError:  # one by one, to find the documents that are wrong
            for document in documents:
                try:
                    found.append(_ids_of(document, self.text_key, tokenizer))
                except DataError as error:
                    if not self.skips_errors:
                        raise
                    rejected.append(_rejected(document, error))
        encodings = [[*tokenizer.beginning, *ids, self.eod] for ids in found if ids]
        return Encoded(
            tokens=np.fromiter(chain.from_iterable(encodings), dtype=token_dtype(tokenizer.vocab_size)),
            lengths=np.array([len(ids) for ids in encodings], dtype=np.int32),
            weight=sum(document.weight for document in documents),
            num_empty=len(found) - len(encodings),
            rejected=rejected,
        )


def _ids_of(document: Document, text_key: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a document's text. Raises DataError with the place of the document."""
    text = text_of(document, text_key)
    try:
        return tokenizer.encode(text)
    except DataError as error:
        raise DataError(f"{document.place}: {error}") from None


def _rejected(document: Document, error: DataError) -> dict[str, str]:
    content = document.content
    text = content.decode(errors="backslashreplace") if isinstance(content, bytes) else str(content or "")
    text = text.encode(errors="backslashreplace").decode()  # a text of a dataset may hold half a surrogate pair
    return {"place": document.place, "reason": str(error), "text": text[:MAX_REJECTED_CHARACTERS]}


@lru_cache(maxsize=1)
def _tokenizer_of_this_process(path: str, eod: int, bos: int | None) -> Tokenizer:
    return Tokenizer.from_file(path, eod, bos)


def _start_method() -> str:
    """Return how workers start: not by "fork", which can deadlock after the tokenizer's threads have run."""
    return "forkserver" if len(os.fsencode(tempfile.gettempdir())) < MAX_TEMPORARY_FOLDER else "spawn"


def encode_in_order(encoder: Encoder, documents: Iterable[Document], num_workers: int) -> Iterator[Encoded]:
    """Encode batches of documents in `num_workers` processes and yield them in the order in which they were read."""
    pending: deque[Future[Encoded]] = deque()
    pool = ProcessPoolExecutor(num_workers, get_context(_start_method()), initializer=_start_worker)
    try:
        for batch in _batches(documents):
            pending.append(pool.submit(encoder, batch))
            if len(pending) > BATCHES_AHEAD * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError(f"one of {num_workers} workers was killed, probably out of memory; lower --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    batch_bytes = 0
    for document in documents:
        batch.append(document)
        batch_bytes += len(content) if isinstance(content := document.content, (bytes, str)) else 0
        batch_bytes += DOCUMENT_OVERHEAD_BYTES
        if batch_bytes >= BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; only the reader handles it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker uses one core
