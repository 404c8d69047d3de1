"""The size of chunks, and Belady's rule compared with every other choice."""

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.core.partition.layout import ALIGNMENT
from zero.homes.budget.chunks import MEBI, Cycle, search_chunk_size
from zero.settings.config import OffloadConfig


@pytest.mark.parametrize(
    ("unit_numels", "smallest", "search_range", "step", "expected"),
    [
        ([300_000] * 10, 90_000, 20_000, 16, (100_000, 0)),  # blocks that repeat are filled without a gap
        ([5120, 640], 1, 2**40, 1, (640, 0)),  # not searched further than the largest unit
        ([1000, 500], 32 * MEBI, 0, 1024, (32 * MEBI, 2 * 32 * MEBI - 1008 - 512)),  # a chunk holds any unit
        ([], 32 * MEBI, 0, 1024, (16, 0)),
    ],
)
def test_the_size_that_leaves_least_empty_is_chosen(unit_numels, smallest, search_range, step, expected):
    config = OffloadConfig(hidden_dim=step, min_chunk_size_m=smallest / MEBI, search_range_m=search_range / MEBI)
    assert search_chunk_size(unit_numels, config, ALIGNMENT) == expected


def fetched_by_belady(rounds: list[int], num_places: int) -> int:
    """Return how many chunks are fetched over the rounds, all of one size, beginning with none."""
    cycle = Cycle([[chunk] for chunk in rounds])
    held: list[int] = []
    fetched = 0
    for position, chunk in enumerate(rounds):
        fetched += chunk not in held
        held = cycle.choose_kept(dict.fromkeys([*held, chunk]), position, num_places, lambda _chunk: 1)
    return fetched


def least_fetched(uses: tuple[int, ...], num_places: int) -> int:
    """Return the fewest fetches of all choices of the chunks that stay, by trying each."""

    @cache
    def least(position: int, held: frozenset[int]) -> int:
        if position == len(uses):
            return 0
        chunk = uses[position]
        candidates = held | {chunk}
        choices = [candidates] if len(candidates) <= num_places else [candidates - {c} for c in candidates]
        return (chunk not in held) + min(least(position + 1, frozenset(choice)) for choice in choices)

    return least(0, frozenset())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(0, 4))
@settings(max_examples=100)
def test_no_other_choice_of_what_stays_fetches_less(uses, num_places):
    """The sequence ends: after it no chunk is used again."""
    ends = [*uses, *(-1 - n for n in range(len(uses) + 1))]
    assert fetched_by_belady(ends, num_places) - len(ends) + len(uses) == least_fetched(tuple(uses), num_places)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 4), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_a_plan_stays_within_its_rooms_and_keeps_the_chunk_that_is_used_next(uses, num_places, random):
    rooms = [random.randint(0, num_places) for _ in uses]
    plan = Cycle([[chunk] for chunk in uses]).plan(rooms, lambda _chunk: 1)
    for position, (before, after) in enumerate(plan):
        assert len(before) <= rooms[position]
        assert len(after) <= rooms[position]
        assert after <= before | {uses[position]}
        assert before <= plan[position - 1][1]
        if rooms[position] and uses[position] in plan[position - 1][1]:
            assert uses[position] in before, "the next to be used is the last to go"


def test_a_chunk_that_no_position_uses_is_never_used_next():
    cycle = Cycle([["a"], ["b", "a"]])
    assert [cycle.next_use(chunk, 0) for chunk in ("a", "b", "c")] == [1, 1, math.inf]
    assert [cycle.next_use(chunk, 1) for chunk in ("a", "b", "c")] == [1, 2, math.inf]
