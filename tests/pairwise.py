"""Combinations of the values of several factors: all of them, or a few that contain every pair of values.

The default suite runs the few; the complete product is marked `full`.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def pairwise(**factors: list[Any]) -> list[dict[str, Any]]:
    """Choose combinations greedily: each is the one of the product that covers most pairs still missing."""
    product = product_of(factors, *factors)
    bits: dict[tuple, int] = defaultdict(lambda: 1 << len(bits))  # a pair is a bit: sets of pairs are counted fast
    pairs_of = [sum(bits[pair] for pair in itertools.combinations(c.items(), 2)) for c in product]
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(range(len(product)), key=lambda number: (pairs_of[number] & missing).bit_count())
        chosen.append(product[best])
        missing &= ~pairs_of[best]
    return chosen


def product_of(factors: dict[str, list[Any]], *names: str) -> list[dict[str, Any]]:
    """Return all combinations of the values of the named factors."""
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(factors[name] for name in names))]


@contextmanager
def noting(case: object) -> Iterator[None]:
    """Name the case in an error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {case}")
        raise
