"""Combinations of the values of several factors: all of them, or a few that contain every pair of values.

The default suite runs the few; the complete product is marked `full`.
"""

import itertools
from typing import Any


def pairwise(**factors: list[Any]) -> list[dict[str, Any]]:
    """Choose combinations greedily: each is the one of the product that covers most pairs still missing."""
    product = product_of(factors, *factors)
    missing = set().union(*map(_pairs, product))
    chosen = []
    while missing:
        best = max(product, key=lambda combination: len(_pairs(combination) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def product_of(factors: dict[str, list[Any]], *names: str) -> list[dict[str, Any]]:
    """Return all combinations of the values of the named factors."""
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(factors[name] for name in names))]


def _pairs(combination: dict[str, Any]) -> set[tuple]:
    return set(itertools.combinations(combination.items(), 2))
