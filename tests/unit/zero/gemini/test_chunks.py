"""Chunk sizes compared with those of ColossalAI's search, and Belady's rule with every other choice."""

import math
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.gemini.chunks import MEBI, ChunkSize, Cycle, search_chunk_size
from zero.memory.placement import OffloadConfig
from zero.partition.layout import Layout
from zero.units.unit import assign_parameters, find_units

GPT2_SIZES = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}


def gpt2(num_layers: int, hidden_size: int, vocab_size: int = 50257) -> torch.nn.Module:
    config = transformers.GPT2Config(n_layer=num_layers, n_embd=hidden_size, n_head=4, vocab_size=vocab_size)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        model.tie_weights()
    return model


def units_of(model: torch.nn.Module) -> list[list[int]]:
    """Return the number of elements of each parameter, by unit."""
    units = assign_parameters(model, find_units(model)).values()
    return [[param.numel() for param in params.values()] for params in units if params]


def colossalai_search(numels: list[int], interval: int, range_m: float, min_m: float) -> tuple[int, int]:
    """Return (elements of a chunk, elements wasted) of ColossalAI's `search_chunk_configuration`.

    It puts whole parameters into chunks in their order; those more than three standard deviations larger than the mean
    are left out.
    """
    limit = np.mean(numels) + 3 * np.std(numels)
    kept = [numel for numel in numels if numel <= limit]
    start = math.ceil(max(round(min_m * MEBI), *kept) / interval) * interval

    def wasted(chunk_numel: int) -> int:
        waste = left = 0
        for numel in kept:
            if numel > left:
                waste, left = waste + left, chunk_numel
            left -= numel
        return waste + left

    sizes = range(start, start + round(range_m * MEBI) + 1, interval)
    return min(((size, wasted(size)) for size in sizes), key=lambda found: found[1])


def our_waste(units: list[list[int]], chunk_numel: int, num_shards: int) -> int:
    """Return the number of elements that are allocated and belong to no parameter."""
    layouts = [
        Layout.of({f"{n}": torch.Size([numel]) for n, numel in enumerate(unit)}, num_shards, chunk_numel)
        for unit in units
    ]
    return sum(layout.numel for layout in layouts) - sum(map(sum, units))


@pytest.mark.parametrize("num_shards", [1, 2, 8])
@pytest.mark.parametrize("name", GPT2_SIZES)
def test_no_more_is_wasted_than_by_colossalais_search(name, num_shards):
    num_layers, hidden_size = GPT2_SIZES[name]
    model = gpt2(num_layers, hidden_size)
    units = units_of(model)
    _, theirs = colossalai_search([param.numel() for param in model.parameters()], hidden_size, 32, 32)
    found = search_chunk_size(map(sum, units), OffloadConfig(hidden_dim=hidden_size), num_shards)
    assert our_waste(units, found.numel, num_shards) <= theirs
    assert found.numel % num_shards == 0


def test_an_endless_range_is_searched_no_further_than_the_largest_unit():
    config = OffloadConfig(hidden_dim=1, min_chunk_size_m=1e-6, search_range_m=2**20)
    assert search_chunk_size([5120, 640], config, 1) == ChunkSize(640, 0)


def test_one_chunk_holds_a_model_that_is_smaller_than_the_smallest():
    found = search_chunk_size([1000, 500], OffloadConfig(), 2)
    assert found.numel == 32 * MEBI
    assert search_chunk_size([], OffloadConfig(), 4).unfilled_numel == 0


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
@settings(max_examples=200, deadline=None)
def test_no_other_choice_of_what_stays_fetches_less(uses, num_places):
    """The sequence ends: after it no chunk is used again."""
    ends = [*uses, *(-1 - n for n in range(len(uses) + 1))]
    assert fetched_by_belady(ends, num_places) - len(ends) + len(uses) == least_fetched(tuple(uses), num_places)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 4), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
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
