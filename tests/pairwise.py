"""Combinations of the values of several factors: all of them, or a few that contain every pair of values.

The default suite runs the few; the complete product is marked `full`.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def pairwise(**factors: list[Any]) -> list[dict[str, Any]]:
    """Choose a few combinations that contain every pair of values."""
    return covering(factors, 2)


def covering(
    factors: dict[str, list[Any]], size: int, is_possible: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Choose possible combinations that contain all pairs (`size` 2), or triples, of values that one of them contains.

    Greedily: each is the one of the product that covers most of those still missing.
    """
    product = list(filter(is_possible, product_of(factors, *factors)))
    bits: dict[tuple, int] = defaultdict(lambda: 1 << len(bits))  # a pair is a bit: sets of pairs are counted fast
    covered_by = [sum(bits[values] for values in itertools.combinations(c.items(), size)) for c in product]
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(range(len(product)), key=lambda number: (covered_by[number] & missing).bit_count())
        chosen.append(product[best])
        missing &= ~covered_by[best]
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
