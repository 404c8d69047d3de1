"""The layout of a flat buffer: nothing overlaps, nothing is lost, and all ranks own equally many elements."""

from math import gcd

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.comm_log import CommLog
from parallel.mesh import Axis
from zero.chosen import transport_of
from zero.core.partition.layout import ALIGNMENT, Layout, overlap
from zero.settings.config import ZeroConfig

SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=3).map(torch.Size), min_size=1, max_size=8)
LAYOUTS = st.builds(
    lambda shapes, num_shards, bucket_numel: Layout.of(
        {f"w{index}": shape for index, shape in enumerate(shapes)}, num_shards, bucket_numel
    ),
    SHAPES,
    st.integers(1, 5),
    st.integers(1, 3000),
)


def elements_of(*ranges: range) -> list[int]:
    return [element for elements in ranges for element in elements]


@given(LAYOUTS)
def test_spans_are_aligned_and_as_long_as_their_parameters(layout):
    for span in layout.spans:
        assert span.elements.start % ALIGNMENT == 0
        assert len(span.elements) == span.shape.numel()
    for before, after in zip(layout.spans, layout.spans[1:], strict=False):
        assert 0 <= after.elements.start - before.elements.stop < ALIGNMENT


@given(LAYOUTS)
def test_buckets_follow_each_other_and_hold_every_span(layout):
    assert layout.buckets[0].elements.start == 0
    assert layout.spans[-1].elements.stop <= layout.numel == layout.buckets[-1].elements.stop
    for before, after in zip(layout.buckets, layout.buckets[1:], strict=False):
        assert after.elements.start == before.elements.stop
    assert len({len(bucket.elements) for bucket in layout.buckets[:-1]}) <= 1
    assert len(layout.buckets[-1].elements) <= len(layout.buckets[0].elements)


@given(LAYOUTS)
def test_the_shards_of_a_bucket_are_equal_aligned_and_cover_it(layout):
    for bucket in layout.buckets:
        shards = [bucket.ranges(rank).own for rank in range(bucket.num_shards)]
        assert elements_of(*shards) == list(bucket.elements)
        assert {len(shard) for shard in shards} == {bucket.rest_numel}
        assert all(shard.start % ALIGNMENT == 0 for shard in shards)


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from(["group", "all"]), st.sampled_from([16, 256]))
def test_the_grain_of_buckets_is_the_least_that_cuts_each_shard_between_groups(group_size, num_groups, over, alignment):
    """Into aligned parts if each is owned, and else, for sums in fp32, into equal messages."""
    inner, outer = (Axis(name, size, 0, CommLog()) for name, size in (("shard", group_size), ("replica", num_groups)))
    data = Axis("data", group_size * num_groups, 0, CommLog(), parts=(inner, outer))
    for sums in ("message", "fp32"):
        config = ZeroConfig(3, optimizer_over=over, sum_over_ranks=sums, alignment=alignment)
        shard = alignment * (num_groups if over == "all" else num_groups // gcd(alignment, num_groups))
        expected = group_size * (alignment if (over, sums) == ("group", "message") else shard)
        assert transport_of(config, data).grain(alignment) == expected


@given(LAYOUTS)
def test_pieces_and_gaps_cover_a_bucket_once(layout):
    for bucket in layout.buckets:
        pieces = [part for _, part in layout.spans_in(bucket.elements)]
        gaps = list(layout.gaps(bucket.elements))
        assert all(gaps)
        assert sorted(elements_of(*pieces, *gaps)) == list(bucket.elements)


def test_a_known_layout():
    shapes = {"w": torch.Size([5, 7]), "b": torch.Size([5]), "gain": torch.Size([])}
    layout = Layout.of(shapes, num_shards=2, bucket_numel=40)
    assert [span.elements for span in layout.spans] == [range(35), range(48, 53), range(64, 65)]
    assert [bucket.elements for bucket in layout.buckets] == [range(64), range(64, 96)]
    assert [bucket.ranges(1).own for bucket in layout.buckets] == [range(32, 64), range(80, 96)]
    assert list(layout.gaps(range(64))) == [range(35, 48), range(53, 64)]


@pytest.mark.parametrize(
    ("a", "b", "numel"), [(range(5), range(3, 9), 2), (range(3), range(3, 9), 0), (range(5, 6), range(3), 0)]
)
def test_ranges_overlap(a, b, numel):
    assert len(overlap(a, b)) == len(overlap(b, a)) == numel
