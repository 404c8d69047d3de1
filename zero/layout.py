"""Where every parameter element lies and who owns it. Pure arithmetic on names and shapes: no memory, no ranks' state.

| w1 ................ | w2 .... |0| b |0|0|    one flat buffer; starts are aligned, gaps and the end are zero
|     bucket 0     |     bucket 1     | w. 2 |  one bucket = one communication; parameters may cross buckets
| s0  |  s1  |  s2 | s0  |  s1  |  s2 | s0 ..|  equal shards: rank r owns shard r of every bucket
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # elements: shards and parameters start on 32 bytes in bf16


def round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def cut(flat: Tensor, elements: range, origin: int = 0) -> Tensor:
    """The `elements` of a buffer, from a tensor whose first element is the buffer's element `origin`."""
    return flat[elements.start - origin : elements.stop - origin]


@dataclass(frozen=True)
class Span:
    """Where one parameter lies in its buffer."""

    name: str
    shape: torch.Size
    elements: range

    def view(self, buffer: Tensor) -> Tensor:
        return cut(buffer, self.elements).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """A stretch of a buffer that is communicated at once."""

    elements: range
    num_shards: int

    @property
    def shard_numel(self) -> int:
        return len(self.elements) // self.num_shards

    def shard(self, rank: int) -> range:
        start = self.elements.start + rank * self.shard_numel
        return range(start, start + self.shard_numel)


@dataclass(frozen=True)
class Layout:
    """The spans and buckets of one buffer, both in ascending order."""

    spans: tuple[Span, ...]
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, shapes: dict[str, torch.Size], num_shards: int, bucket_numel: int) -> "Layout":
        spans, stop = [], 0
        for name, shape in shapes.items():
            spans.append(Span(name, shape, range(stop, stop + shape.numel())))
            stop = round_up(spans[-1].elements.stop, ALIGNMENT)
        stop = max(stop, ALIGNMENT)  # parameters without elements need a place too
        grain = num_shards * ALIGNMENT
        return cls(tuple(spans), _buckets(round_up(stop, grain), round_up(bucket_numel, grain), num_shards))

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> "Layout":
        """The inverse of `describe`."""
        spans = []
        for name, (shape, start) in description["spans"].items():
            spans.append(Span(name, torch.Size(shape), range(start, start + torch.Size(shape).numel())))
        buckets = _buckets(description["numel"], description["bucket_numel"], description["num_shards"])
        return cls(tuple(spans), buckets)

    def describe(self) -> dict[str, Any]:
        """For JSON: names, shapes and starts. Buckets and shards are arithmetic: nothing grows with their number."""
        return {
            "numel": self.numel,
            "bucket_numel": len(self.buckets[0].elements),
            "num_shards": self.buckets[0].num_shards,
            "spans": {span.name: [list(span.shape), span.elements.start] for span in self.spans},
        }

    @property
    def numel(self) -> int:
        return self.buckets[-1].elements.stop

    def pieces(self, elements: range) -> Iterator[tuple[Span, range]]:
        """The parameters that lie in `elements`, each with its part of them."""
        first = bisect_right(self.spans, elements.start, key=lambda span: span.elements.stop)
        for span in islice(self.spans, first, None):
            if span.elements.start >= elements.stop:
                break
            if part := overlap(span.elements, elements):
                yield span, part

    def shards(self, elements: range) -> Iterator[tuple[int, range]]:
        """(rank, part) of every shard that has a part of `elements`, in ascending order."""
        bucket_numel = len(self.buckets[0].elements)
        for bucket in self.buckets[elements.start // bucket_numel : -(-elements.stop // bucket_numel)]:
            inside = overlap(bucket.elements, elements)
            first, last = ((e - bucket.elements.start) // bucket.shard_numel for e in (inside.start, inside.stop - 1))
            for rank in range(first, last + 1):
                yield rank, overlap(bucket.shard(rank), inside)

    def gaps(self, elements: range) -> Iterator[range]:
        """The stretches of `elements` where no parameter lies."""
        start = elements.start
        for _, part in self.pieces(elements):
            if start < part.start:
                yield range(start, part.start)
            start = part.stop
        if start < elements.stop:
            yield range(start, elements.stop)


def _buckets(numel: int, bucket_numel: int, num_shards: int) -> tuple[Bucket, ...]:
    """All of `bucket_numel` elements, but for the last."""
    starts = range(0, numel, bucket_numel)
    return tuple(Bucket(range(s, min(s + bucket_numel, numel)), num_shards) for s in starts)


def innermost_unit(parameter_names: Iterable[str], unit_names: Iterable[str]) -> str:
    """The smallest unit that holds a parameter under all of its names; "" is the whole model and holds everything.

    A parameter tied across two units so belongs to the unit around both, and is there whenever either runs.
    """
    names = list(parameter_names)
    return max((u for u in unit_names if all(f".{name}".startswith(f".{u}." if u else ".") for name in names)), key=len)
