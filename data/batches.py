"""The micro-batches of one data-parallel rank, which a thread reads ahead.

a step's samples    | rank 0 | rank 1 | rank 0 | rank 1 |      micro_batch_size samples each, data_size 2
micro-batch         |       0         |        1        |

Ranks may form several units of consecutive ranks: each unit then has consecutive samples, which its ranks divide so.
"""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np
import torch

from data.documents import NOT_COUNTED, DocumentBatch, MicroBatch
from data.errors import DataError

STEPS_AHEAD = 2  # read before they are requested


class Samples(Protocol):
    """An endless sequence of samples, int64 arrays.

    Their shape is (seq_length + 1,), or (3, seq_length) if documents are kept apart: see `data.documents`.
    """

    def __getitem__(self, sample: int) -> np.ndarray: ...

    def place(self, sample: int) -> str:
        """Return the file and the document in which a sample starts, for error messages."""


@dataclass(frozen=True)
class BatchLoader:
    """A reader of this rank's part of each step. All ranks together read every sample of a step once."""

    samples: Samples
    _: KW_ONLY
    micro_batch_size: int
    data_rank: int
    data_size: int
    vocab_size: int
    pin_memory: bool = False
    num_units: int = 1

    def steps(self, plan: Iterable[tuple[int, int]]) -> Generator[list[MicroBatch], None, None]:
        """Yield a list of micro-batches for each step (first_sample, global_batch_size) of `plan`.

        Two steps are read ahead of the one in use, so `plan` is consumed ahead too. Closing the iterator ends the
        thread. Raises DataError if a token is outside the vocabulary, or if micro_batch_size x data_size does not
        divide global_batch_size.
        """
        reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-reader")
        ahead: deque[Future[list[MicroBatch]]] = deque()
        try:
            # One thread reads the steps in the order of the queue, so results are yielded in the order of `plan`.
            for first_sample, global_batch_size in plan:
                ahead.append(reader.submit(self._read_step, first_sample, global_batch_size))
                if len(ahead) > STEPS_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            reader.shutdown(cancel_futures=True)

    def read_of(self, data_rank: int, micro_batch: int, first_sample: int, global_batch_size: int) -> MicroBatch:
        """Return a micro-batch of a step as another rank reads it."""
        return self._read_micro_batch(self._first_samples(data_rank, first_sample, global_batch_size)[micro_batch])

    def _read_step(self, first_sample: int, global_batch_size: int) -> list[MicroBatch]:
        first_samples = self._first_samples(self.data_rank, first_sample, global_batch_size)
        return [self._read_micro_batch(sample) for sample in first_samples]

    def _first_samples(self, data_rank: int, first_sample: int, global_batch_size: int) -> range:
        """Return the number of the first sample of each micro-batch of a rank."""
        samples_per_micro_batch = self.micro_batch_size * self.data_size
        if global_batch_size % samples_per_micro_batch:
            raise DataError(
                f"train.global_batch_size={global_batch_size} is not divisible by train.micro_batch_size x data size = "
                f"{self.micro_batch_size} x {self.data_size}; choose a multiple of {samples_per_micro_batch}"
            )
        of_unit = global_batch_size // self.num_units
        unit, rank = divmod(data_rank, self.data_size // self.num_units)
        first_of_rank = first_sample + unit * of_unit + rank * self.micro_batch_size
        return range(first_of_rank, first_of_rank + of_unit, samples_per_micro_batch // self.num_units)

    def _read_micro_batch(self, first_sample: int) -> MicroBatch:
        tokens = np.stack([self.samples[first_sample + row] for row in range(self.micro_batch_size)])
        self._check_vocabulary(tokens, first_sample)
        batch = torch.from_numpy(tokens) if tokens.ndim == 2 else DocumentBatch.of(tokens)
        return batch.pin_memory() if self.pin_memory else batch

    def _check_vocabulary(self, tokens: np.ndarray, first_sample: int) -> None:
        """Raise DataError if a token has no row in the embedding.

        Without this check, the lookup on a GPU would fail by a device-side assertion that names neither token nor file.
        """
        if tokens.ndim == 3:
            tokens = tokens[:, :2]  # the others are positions
            tokens = np.where(tokens == NOT_COUNTED, 0, tokens)
        if tokens.min() >= 0 and tokens.max() < self.vocab_size:
            return
        place = tuple(np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0])
        sample = first_sample + int(place[0])
        raise DataError(
            f"token id {tokens[place]} in sample {sample} ({self.samples.place(sample)}) is outside "
            f"model.vocab_size={self.vocab_size}; raise it to the tokenizer's size or prepare the data with another"
        )
