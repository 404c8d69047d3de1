"""The layout of parameters in flat buffers, and the elements that each rank owns.

| w1 ................ | w2 .... |0| b |0|0|    one flat buffer; starts are aligned, gaps and the end are zero
|     bucket 0     |     bucket 1     | b. 2 |  one bucket = one collective; parameters may cross buckets
| s0  |  s1  |  s2 | s0  |  s1  |  s2 | s0 ..|  equal shards: rank r owns shard r of every bucket

This file is arithmetic on names and shapes: it allocates nothing and is the same on every rank.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16  # elements: shards and parameters start on 32 bytes in bf16


def round_up(numel: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `numel`."""
    return -(-numel // multiple) * multiple


def overlap(a: range, b: range) -> range:
    """Return the elements that are in both ranges."""
    return range(max(a.start, b.start), min(a.stop, b.stop))


def real_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor in a flat buffer, whose elements are real: a complex number is two of them."""
    return torch.Size((*tensor.shape, 2)) if tensor.is_complex() else tensor.shape


def cut(flat: Tensor, elements: range, origin: int = 0) -> Tensor:
    """Return a view of the `elements` of a buffer; the first element of `flat` is the buffer's element `origin`."""
    return flat[elements.start - origin : elements.stop - origin]


@dataclass(frozen=True)
class Span:
    """The place of one parameter in its buffer."""

    name: str
    shape: torch.Size  # if the parameter is complex, with one more dim, of size 2
    elements: range

    def view(self, buffer: Tensor, *, as_complex: bool = False) -> Tensor:
        """Return the parameter, in its shape, as a view of the full buffer."""
        view = cut(buffer, self.elements).view(self.shape)
        return torch.view_as_complex(view) if as_complex else view


@dataclass(frozen=True)
class BucketRange:
    """The elements of one bucket, which are divided into equal shards."""

    elements: range
    num_shards: int

    @property
    def shard_numel(self) -> int:
        """The number of elements in each shard."""
        return len(self.elements) // self.num_shards

    def shard(self, rank: int) -> range:
        """Return the elements of the buffer that `rank` owns."""
        start = self.elements.start + rank * self.shard_numel
        return range(start, start + self.shard_numel)


@dataclass(frozen=True)
class Layout:
    """The spans and buckets of one flat buffer, both in ascending order."""

    spans: tuple[Span, ...]
    buckets: tuple[BucketRange, ...]

    @classmethod
    def of(
        cls, shapes: dict[str, torch.Size], num_shards: int, bucket_numel: int, alignment: int = ALIGNMENT
    ) -> "Layout":
        """Lay out parameters; `bucket_numel` is rounded up to a multiple of `num_shards` times the alignment.

        Parameters and shards begin at multiples of `alignment` elements.
        """
        spans, stop = [], 0
        for name, shape in shapes.items():
            spans.append(Span(name, shape, range(stop, stop + shape.numel())))
            stop = round_up(spans[-1].elements.stop, alignment)
        stop = max(stop, alignment)  # a parameter without elements needs a buffer too
        grain = num_shards * alignment
        return cls(tuple(spans), cut_into_buckets(round_up(stop, grain), round_up(bucket_numel, grain), num_shards))

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
        """Iterate over (rank, its range) of every shard that has some of `elements`, in ascending order."""
        bucket_numel = len(self.buckets[0].elements)
        for bucket in self.buckets[elements.start // bucket_numel : -(-elements.stop // bucket_numel)]:
            inside = overlap(bucket.elements, elements)
            first, last = ((e - bucket.elements.start) // bucket.shard_numel for e in (inside.start, inside.stop - 1))
            for rank in range(first, last + 1):
                yield rank, overlap(bucket.shard(rank), inside)

    def gaps(self, elements: range) -> Iterator[range]:
        """Iterate over the ranges of `elements` that belong to no parameter."""
        start = elements.start
        for _, own in self.spans_in(elements):
            if start < own.start:
                yield range(start, own.start)
            start = own.stop
        if start < elements.stop:
            yield range(start, elements.stop)


def cut_into_buckets(numel: int, bucket_numel: int, num_shards: int) -> tuple[BucketRange, ...]:
    """Return buckets of `bucket_numel` elements; the last one may be shorter."""
    starts = range(0, numel, bucket_numel)
    return tuple(BucketRange(range(s, min(s + bucket_numel, numel)), num_shards) for s in starts)
