"""The batch loader: the samples of each rank and step, and the thread that reads ahead."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
import torch

from data.batches import STEPS_AHEAD, BatchLoader
from data.blend import open_samples
from data.errors import DataError


class NumberedSamples:
    """Samples of which number i is [i, i]. Records which ones were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, sample: int) -> np.ndarray:
        self.read.append(sample)
        return np.array([sample, sample])

    def place(self, sample: int) -> str:
        return f"corpus.bin, document {sample}"


def _loader(samples, *, data_rank=0, data_size=1, micro_batch_size=2, vocab_size=1 << 20) -> BatchLoader:
    return BatchLoader(
        samples, micro_batch_size=micro_batch_size, data_rank=data_rank, data_size=data_size, vocab_size=vocab_size
    )


def _plan(first: int, steps: int, global_batch_size: int) -> list[tuple[int, int]]:
    return [(first + step * global_batch_size, global_batch_size) for step in range(steps)]


def _readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batch-reader")]


@pytest.mark.parametrize("data_size", [1, 2, 4])
def test_all_ranks_together_read_each_step_in_order_whatever_their_number(counting_corpus, data_size):
    samples = open_samples(counting_corpus, split=[1, 0, 0], seq_length=8, seed=3)
    ranks = [_loader(samples, data_rank=rank, data_size=data_size).steps(_plan(5, 12, 16)) for rank in range(data_size)]
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        together = torch.cat([batch for micro_batch in zip(*of_ranks, strict=True) for batch in micro_batch])
        expected = np.stack([samples[5 + 16 * step + row] for row in range(16)])
        assert together.dtype == torch.int64
        assert torch.equal(together, torch.from_numpy(expected))


def test_two_steps_are_read_ahead_and_no_more_and_closing_ends_the_thread():
    samples, numbers = NumberedSamples(), count()
    steps = _loader(samples).steps((2 * step, 2) for step in numbers)
    next(steps)
    assert next(numbers) == 1 + STEPS_AHEAD
    assert len(_readers()) == 1
    steps.close()
    assert len(samples.read) <= 2 * (1 + STEPS_AHEAD)
    assert _readers() == []


def test_steps_that_are_not_begun_are_not_read_after_closing(monkeypatch):
    is_closed, shutdown = threading.Event(), ThreadPoolExecutor.shutdown

    class WaitingSamples(NumberedSamples):
        def __getitem__(self, sample: int) -> np.ndarray:
            if sample >= 2:
                is_closed.wait()
            return super().__getitem__(sample)

    def shutdown_while_a_step_waits(pool: ThreadPoolExecutor, **options: bool) -> None:
        shutdown(pool, wait=False, **options)
        is_closed.set()
        shutdown(pool)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown_while_a_step_waits)
    samples = WaitingSamples()
    steps = _loader(samples).steps(_plan(0, 9, 2))
    next(steps)
    steps.close()
    assert set(samples.read) <= {0, 1, 2, 3}
    assert _readers() == []


def test_an_error_in_the_thread_reaches_the_consumer_at_its_step():
    class FailingSamples(NumberedSamples):
        def __getitem__(self, sample):
            if sample == 5:
                raise OSError("the disk is gone")
            return super().__getitem__(sample)

    steps = _loader(FailingSamples()).steps(_plan(0, 9, 2))
    assert [len(next(steps)) for _ in range(2)] == [1, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)
    assert _readers() == []


def test_a_batch_that_does_not_divide_is_reported_with_both_numbers():
    message = r"train.global_batch_size=10 is not divisible by .* 2 x 4; choose a multiple of 8"
    with pytest.raises(DataError, match=message):
        next(_loader(NumberedSamples(), data_size=4).steps([(0, 10)]))
