"""The order of one epoch in which documents are packed whole into samples, by best fit.

A document of n tokens has n - 1 predictions, from each token but its last. A sample has room for seq_length of them. A
longer document is cut into pieces of seq_length predictions and a rest; the token at a cut is the last one of a piece
and the first one of the next, so that it is predicted.

    pieces      | 7 | 2 ..... | 0 .. | 5 .......... | 3 |      (document, its first token here), bin after bin
    bins        |  0          |  1                  |  2       the contents of one sample each
    bin_starts  0             2                     4          numbers of pieces
    shuffle     2 0 1                                          the epoch's i-th sample is bin shuffle[i]

The sizes of the pieces in each bin are the same in all epochs; each epoch draws anew which pieces of these sizes they
are, and the order of the bins.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data.documents import packed_apart
from data.epochs import shuffled

BLOCK = 1 << 20  # documents whose sizes are counted at once

Content = tuple["Content", int, int] | None  # what was in a bin before, and the size and number of the pieces put in


@dataclass(frozen=True)
class Bins:
    """A number of bins that hold pieces of equal sizes."""

    count: int
    sizes: np.ndarray  # of the pieces in each bin, in predictions, the largest first


@dataclass(frozen=True)
class PackedOrder:
    """The arrays of an epoch: pieces (pieces, 2), bin_starts (samples + 1,), shuffle (samples,).

    Each has the smallest unsigned type that holds its values.
    """

    pieces: np.ndarray
    bin_starts: np.ndarray
    shuffle: np.ndarray


class BestFit:
    """Samples of documents of these lengths: whole ones, which are kept apart, and padding.

    Only documents that are longer than a sample are cut.
    """

    order_type, file_prefix = PackedOrder, "best_fit_"
    need = "have no prediction to pack; choose data.packing=stream"

    def __init__(self, lengths: np.ndarray, seq_length: int, masks_documents: bool) -> None:
        assert masks_documents, "a packed document does not continue the one before it"
        self._lengths, self._seq_length = lengths, seq_length
        num_pieces = count_sizes(lengths, seq_length)
        self._bins = best_fit(num_pieces)
        self.samples_per_epoch = sum(group.count for group in self._bins)
        self.tokens_per_sample = int(num_pieces @ np.arange(seq_length + 1)) / max(self.samples_per_epoch, 1)

    def build(self, seed: int, epoch: int) -> PackedOrder:
        """Return the order of an epoch, a function of the arguments and the lengths alone."""
        generator = np.random.default_rng([seed, epoch])
        documents, starts, sizes = _pieces(self._lengths, self._seq_length)
        by_size = shuffled(len(sizes), generator)
        by_size = by_size[np.argsort(sizes[by_size], kind="stable")]
        places = np.argsort(np.concatenate([np.tile(group.sizes, group.count) for group in self._bins]), kind="stable")
        numbers = np.empty_like(by_size)  # of the pieces, bin after bin
        numbers[places] = by_size
        del by_size, places, sizes
        pieces = np.empty((len(numbers), 2), dtype=np.result_type(documents, starts))
        pieces[:, 0], pieces[:, 1] = documents[numbers], starts[numbers]
        in_bin = np.concatenate([np.repeat(len(group.sizes), group.count) for group in self._bins])
        bin_starts = np.zeros(len(in_bin) + 1, dtype=np.min_scalar_type(len(pieces)))
        np.cumsum(in_bin, out=bin_starts[1:])
        return PackedOrder(pieces, bin_starts, shuffled(len(in_bin), generator))

    def pieces(self, order: PackedOrder, number: int) -> list[tuple[int, slice]]:
        """Return (document, part of its tokens) of each piece of a sample."""
        first, stop = order.bin_starts[number : number + 2].tolist()
        return [
            (document, slice(start, start + self._seq_length + 1))
            for document, start in order.pieces[first:stop].tolist()
        ]

    def sample(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Return the sample of the tokens of these pieces."""
        return packed_apart(pieces, self._seq_length)


def count_sizes(lengths: np.ndarray, seq_length: int) -> np.ndarray:
    """Return the number of pieces of each size, from 0 to seq_length predictions, of documents of these lengths."""
    counts = np.zeros(seq_length + 1, dtype=np.int64)
    for first in range(0, len(lengths), BLOCK):
        whole, rest = np.divmod(_predictions(lengths[first : first + BLOCK]), seq_length)
        counts += np.bincount(rest, minlength=seq_length + 1)
        counts[seq_length] += whole.sum(dtype=np.int64)
    counts[0] = 0
    return counts


def best_fit(num_pieces: np.ndarray) -> list[Bins]:
    """Return the bins into which `num_pieces[size]` pieces of each size are packed.

    A bin has room for the largest size that the array counts. The pieces are put, the largest first, into the bin with
    the least room that suffices (best fit decreasing). All pieces of a size, and all bins of a content, are treated at
    once, so that the time does not depend on their numbers.
    """
    capacity = len(num_pieces) - 1
    unfinished: dict[int, list[tuple[int, Content]]] = {}  # (count, content) of bins, by the room that they have left
    rooms: list[int] = []  # the keys of `unfinished`, sorted
    full: list[tuple[int, Content]] = []

    def put(count: int, room: int, content: Content) -> None:
        if count and not room:
            full.append((count, content))
        elif count:
            if room not in unfinished:
                bisect.insort(rooms, room)
            unfinished.setdefault(room, []).append((count, content))

    def take(place: int) -> tuple[int, int, Content]:
        room = rooms[place]
        count, content = unfinished[room].pop()
        if not unfinished[room]:
            del unfinished[room], rooms[place]
        return count, room, content

    for size in np.flatnonzero(num_pieces)[::-1].tolist():
        num_left = int(num_pieces[size])
        while num_left:
            place = bisect.bisect_left(rooms, size)
            is_new = place == len(rooms)
            count, room, content = (-(-num_left // (capacity // size)), capacity, None) if is_new else take(place)
            num_each = room // size
            # Once a piece is in the bin, its room is less than that of all others that suffice: it gets the next one.
            num_filled = min(count, num_left // num_each)
            put(num_filled, room - num_each * size, (content, size, num_each))
            num_left -= num_filled * num_each
            if num_filled < count:
                if num_left:
                    put(1, room - num_left * size, (content, size, num_left))
                put(count - num_filled - bool(num_left), room, content)
                num_left = 0
    groups = full + [group for room in rooms for group in unfinished[room]]
    return [Bins(count, np.array(list(_sizes(content))[::-1])) for count, content in groups]


def _sizes(content: Content) -> Iterator[int]:
    """Yield the sizes of the pieces in a bin, the last one that was put in first."""
    while content is not None:
        content, size, number = content
        yield from [size] * number


def _pieces(lengths: np.ndarray, seq_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the document of each piece, its first token there, and its size in predictions."""
    predictions = _predictions(lengths)
    counts = -(-predictions // seq_length)
    firsts = np.cumsum(counts, dtype=np.int64)
    num_pieces = int(firsts[-1])
    firsts -= counts
    documents = np.repeat(np.arange(len(lengths), dtype=np.min_scalar_type(len(lengths))), counts)
    starts = np.arange(num_pieces)
    starts -= np.repeat(firsts, counts)
    starts *= seq_length
    starts = starts.astype(np.min_scalar_type(int(starts.max())))
    sizes = np.minimum(predictions[documents] - starts, seq_length).astype(np.min_scalar_type(seq_length))
    return documents, starts, sizes


def _predictions(lengths: np.ndarray) -> np.ndarray:
    return np.maximum(lengths, 1) - 1
