"""The layout of parameters in flat buffers, and the elements that each rank owns.

| w1 ................ | w2 .... |0| b |0|0|    one flat buffer; starts are aligned, gaps and the end are zero
|     bucket 0     |     bucket 1     | b. 2 |  one bucket = one collective; parameters may cross buckets
| s0  |  s1  |  s2 | s0  |  s1  |  s2 | s0 ..|  equal shards: rank r owns shard r of every bucket

A shard may be divided again, into P parts: then S P ranks own a part each, and keep the whole shard of parameters and
sums of gradients. The rank p S + s owns part p of shard s:

|              bucket               |
|   shard 0 = p p p   |   shard 1 = p p p   |   S = 2, P = 3: the owners of the parts are ranks 0 2 4 and 1 3 5

This file is arithmetic on names and shapes: it allocates nothing and is the same on every rank.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGNMENT = 16  # elements: shards and parameters start on 32 bytes in bf16
NORM_BLOCK = 256  # elements whose squares are added first, if the norm must not depend on the number of ranks


def round_up(numel: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `numel`."""
    return -(-numel // multiple) * multiple


def overlap(a: range, b: range) -> range:
    """Return the elements that are in both ranges."""
    return range(max(a.start, b.start), min(a.stop, b.stop))


def shifted(elements: range, origin: int) -> range:
    """Return a range of a buffer as counted from the buffer's element `origin`."""
    return range(elements.start - origin, elements.stop - origin)


def cut(flat: Tensor, elements: range, origin: int = 0) -> Tensor:
    """Return a view of the `elements` of a buffer; the first element of `flat` is the buffer's element `origin`."""
    return flat[elements.start - origin : elements.stop - origin]


@dataclass(frozen=True)
class Span:
    """The place of one parameter in its buffer."""

    name: str
    shape: torch.Size
    elements: range

    def view(self, buffer: Tensor) -> Tensor:
        """Return the parameter, in its shape, as a view of the full buffer."""
        return cut(buffer, self.elements).view(self.shape)


class Slice(NamedTuple):
    """Consecutive elements of a flat buffer that one parameter has."""

    param: nn.Parameter
    span: Span
    elements: range
    """Counted in the flat buffer."""

    @property
    def in_param(self) -> range:
        """The same elements, counted in the flattened parameter."""
        return shifted(self.elements, self.span.elements.start)


class Ranges(NamedTuple):
    """The elements of a flat buffer that a rank has of one bucket; each range is inside the one before."""

    elements: range
    """All elements of the bucket."""
    rest: range
    """Those that the rank keeps: of parameters while the full buffer is freed, and of sums of gradients."""
    own: range
    """Those that the rank updates: of gradients that are reduced, master weights and optimizer states."""

    def of_bucket(self, tensor: Tensor, part: range) -> Tensor:
        """Return a view of a part of a tensor that covers the bucket, and may be longer."""
        return cut(tensor, part, self.elements.start)

    def own_of(self, rest: Tensor) -> Tensor:
        """Return a view of the rank's own elements in a tensor that covers those that it keeps."""
        return cut(rest, self.own, self.rest.start)


@dataclass(frozen=True)
class BucketRange:
    """The elements of one bucket, which are divided into equal shards, and each of these into parts."""

    elements: range
    num_shards: int
    num_parts: int = 1

    @property
    def rest_numel(self) -> int:
        """The number of elements that each rank keeps: a shard."""
        return len(self.elements) // self.num_shards

    @property
    def own_numel(self) -> int:
        """The number of elements that each rank owns: a part of a shard."""
        return self.rest_numel // self.num_parts

    def ranges(self, rank: int) -> Ranges:
        """Return what the rank with this number among the owners has."""
        part, place = divmod(rank, self.num_shards)
        rest = self.elements.start + place * self.rest_numel
        own = rest + part * self.own_numel
        return Ranges(self.elements, range(rest, rest + self.rest_numel), range(own, own + self.own_numel))

    def owners(self, elements: range) -> Iterator[tuple[int, range]]:
        """Iterate over (rank, its range) of every rank that owns some of `elements`, which are inside the bucket."""
        first, last = ((e - self.elements.start) // self.own_numel for e in (elements.start, elements.stop - 1))
        for number in range(first, last + 1):
            place, part = divmod(number, self.num_parts)
            rank = part * self.num_shards + place
            yield rank, overlap(self.ranges(rank).own, elements)


@dataclass(frozen=True)
class Layout:
    """The spans and buckets of one flat buffer, both in ascending order."""

    spans: tuple[Span, ...]
    buckets: tuple[BucketRange, ...]

    @classmethod
    def of(
        cls,
        shapes: dict[str, torch.Size],
        num_shards: int,
        bucket_numel: int,
        alignment: int = ALIGNMENT,
        num_parts: int = 1,
        grain: int | None = None,
    ) -> "Layout":
        """Lay out parameters; `bucket_numel` is rounded up to a multiple of `grain`: `ZeroConfig.grain`.

        Parameters, shards and their parts begin at multiples of `alignment` elements.
        """
        spans, stop = [], 0
        for name, shape in shapes.items():
            spans.append(Span(name, shape, range(stop, stop + shape.numel())))
            stop = round_up(spans[-1].elements.stop, alignment)
        stop = max(stop, alignment)  # a parameter without elements needs a buffer too
        grain = grain or num_shards * num_parts * alignment
        numel, bucket_numel = round_up(stop, grain), round_up(bucket_numel, grain)
        return cls(tuple(spans), cut_into_buckets(numel, bucket_numel, num_shards, num_parts))

    @property
    def numel(self) -> int:
        """The number of elements in the buffer, gaps and padding included."""
        return self.buckets[-1].elements.stop

    def spans_in(self, elements: range) -> Iterator[tuple[Span, range]]:
        """Iterate over the parameters that have elements in `elements`, each with its own of them."""
        first = bisect_right(self.spans, elements.start, key=lambda span: span.elements.stop)
        end = bisect_left(self.spans, elements.stop, key=lambda span: span.elements.start)
        for span in self.spans[first:end]:
            if own := overlap(span.elements, elements):
                yield span, own

    def shards(self, elements: range) -> Iterator[tuple[int, range]]:
        """Iterate over (rank, its range) of every owner of some of `elements`, in the order of these."""
        bucket_numel = len(self.buckets[0].elements)
        for bucket in self.buckets[elements.start // bucket_numel : -(-elements.stop // bucket_numel)]:
            yield from bucket.owners(overlap(bucket.elements, elements))

    def gaps(self, elements: range) -> Iterator[range]:
        """Iterate over the ranges of `elements` that belong to no parameter."""
        start = elements.start
        for _, own in self.spans_in(elements):
            if start < own.start:
                yield range(start, own.start)
            start = own.stop
        if start < elements.stop:
            yield range(start, elements.stop)


def cut_into_buckets(numel: int, bucket_numel: int, num_shards: int, num_parts: int = 1) -> tuple[BucketRange, ...]:
    """Return buckets of `bucket_numel` elements; the last one may be shorter."""
    starts = range(0, numel, bucket_numel)
    return tuple(BucketRange(range(s, min(s + bucket_numel, numel)), num_shards, num_parts) for s in starts)


def rectangles(shape: Sequence[int], elements: range) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut consecutive elements, in row-major order, of a tensor into rectangles: (offsets, sizes) in ascending order.

    A range of a matrix has at most three: the end of a row, whole rows, the beginning of a row.
    """
    if not elements:
        return
    if not shape:
        yield (), ()
        return
    inner = torch.Size(shape[1:])
    row = inner.numel()
    first, last = elements.start // row, (elements.stop - 1) // row
    if first == last:
        for offsets, sizes in rectangles(inner, range(elements.start - first * row, elements.stop - first * row)):
            yield (first, *offsets), (1, *sizes)
        return
    start, stop = -(-elements.start // row), elements.stop // row  # of the rows that are whole
    yield from rectangles(shape, range(elements.start, start * row))
    if start < stop:
        yield (start, *(0 for _ in inner)), (stop - start, *inner)
    yield from rectangles(shape, range(stop * row, elements.stop))
