"""The order of an epoch: its samples, its memory and its cache."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.epochs import Stream, StreamOrder, cached_order
from data.errors import DataError


def build_epoch(lengths: np.ndarray, *, seq_length: int, seed: int, epoch: int) -> StreamOrder:
    return Stream(lengths, seq_length, masks_documents=False).build(seed, epoch)


def _slow_starts(lengths: list[int], order: list[int], seq_length: int) -> list[list[int]]:
    """Walk through the documents token by token and note where each sample starts."""
    tokens = [[place, offset] for place, document in enumerate(order) for offset in range(lengths[document])]
    num_samples = (len(tokens) - 1) // seq_length
    return [tokens[sample * seq_length] for sample in range(num_samples + 1)]


@example([300, 300], 7, 0)  # more tokens in a document than a byte counts
@example([1] * 300, 7, 0)  # more documents
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 1),
    st.integers(1, 12),
    st.integers(0, 3),
)
def test_sample_starts_equal_a_walk_token_by_token(lengths, seq_length, epoch):
    order = build_epoch(np.array(lengths), seq_length=seq_length, seed=5, epoch=epoch)
    assert sorted(order.document_order) == list(range(len(lengths)))
    assert order.sample_starts.tolist() == _slow_starts(lengths, order.document_order.tolist(), seq_length)
    assert sorted(order.shuffle) == list(range(len(order.sample_starts) - 1))


def test_seeds_and_epochs_have_different_orders():
    lengths = np.full(50, 10)
    orders = [build_epoch(lengths, seq_length=10, seed=seed, epoch=epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order.document_order) for order in orders}) == 4
    assert len({tuple(order.shuffle) for order in orders}) == 4


def test_a_large_order_takes_memory_in_proportion_to_itself():
    """100 million tokens in 2 million documents: beside the result, three arrays of eight bytes a document suffice."""
    lengths = np.full(2_000_000, 50, dtype=np.int32)
    tracemalloc.start()
    order = build_epoch(lengths, seq_length=1024, seed=1, epoch=0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    result_bytes = sum(array.nbytes for array in vars(order).values())
    assert result_bytes <= 4 * len(lengths) + 12 * len(order.shuffle) + 8 * 4
    assert peak_bytes <= result_bytes + 24 * len(lengths) + 100 * len(order.shuffle)


def test_a_cached_order_is_built_once_and_then_memory_mapped(tmp_path):
    built = []

    def build():
        built.append(1)
        return build_epoch(np.full(10, 20), seq_length=16, seed=1, epoch=0)

    cache = tmp_path / "of" / "orders"
    fresh, again = (cached_order(cache, "stem", StreamOrder, build) for _ in range(2))
    assert len(built) == 1
    assert all(isinstance(array, np.memmap) for array in vars(again).values())
    assert all(np.array_equal(*pair) for pair in zip(vars(fresh).values(), vars(again).values(), strict=True))
    names = ["stem.crc32.json", "stem.document_order.npy", "stem.sample_starts.npy", "stem.shuffle.npy"]
    assert sorted(path.name for path in cache.iterdir()) == names
    for number, name in enumerate(names, 2):
        (cache / name).unlink()
        cached_order(cache, "stem", StreamOrder, build)
        assert len(built) == number
        assert (cache / name).exists()


def test_files_that_another_process_has_written_meanwhile_are_not_replaced(tmp_path):
    order = build_epoch(np.full(10, 20), seq_length=16, seed=1, epoch=0)

    def build():
        cached_order(tmp_path, "stem", StreamOrder, lambda: order)
        inodes.update({path: path.stat().st_ino for path in tmp_path.iterdir()})
        return order

    inodes = {}
    cached_order(tmp_path, "stem", StreamOrder, build)
    assert len(inodes) == 4
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == inodes


def test_a_folder_that_cannot_be_written_is_reported_with_its_setting(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write the sample order to .*; set data.cache_dir"):
        cached_order(
            tmp_path / "file" / "cache",
            "stem",
            StreamOrder,
            lambda: build_epoch(np.full(9, 9), seq_length=4, seed=1, epoch=0),
        )
