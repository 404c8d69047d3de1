"""The imitated caching allocator, and M_D in it (section 6.3 of the paper)."""

import re
from contextlib import nullcontext

import pytest

from lab.observe.caching_allocator import MIB, CachingAllocator, OutOfMemory
from lab.paper.fragments import section_6


@pytest.mark.parametrize(("released", "fits"), [((1, 2), True), ((1, 3), False)])
def test_free_neighbours_become_one_block_and_others_do_not(released: tuple[int, int], fits: bool):
    allocator = CachingAllocator(100 * MIB)
    allocator.replay([(5, 100 * MIB), (5, -1), *((n, 20 * MIB) for n in range(5)), *((n, -1) for n in released)])
    with nullcontext() if fits else pytest.raises(OutOfMemory, match=f"although {40 * MIB} are free"):
        allocator.replay([(6, 40 * MIB)])
    assert allocator.reserved == 100 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken_and_cut():
    allocator = CachingAllocator(80 * MIB)
    allocator.replay([(0, 50 * MIB), (1, 30 * MIB), (0, -1), (1, -1), (2, 24 * MIB), (3, 50 * MIB), (4, 6 * MIB)])
    assert allocator.reserved == 80 * MIB


def test_free_segments_are_given_back_before_the_memory_is_out():
    allocator = CachingAllocator(64 * MIB)
    allocator.replay([(0, 32 * MIB), (1, 32 * MIB), (0, -1), (1, -1), (2, 64 * MIB)])
    assert allocator.reserved == 64 * MIB


def test_a_step_ends_out_of_memory_by_fragments_without_defragmented_memory():
    status, lines = section_6("--model.num_layers=6")
    with_m_d, without = lines[2:]
    assert status.startswith("right")
    assert with_m_d.endswith("| trains |")
    found = re.search(r"out of memory: ([0-9.]+) GB, ([0-9.]+) free", without)
    assert found
    asked, free = map(float, found.groups())
    assert free > asked, "memory is free, in pieces"
