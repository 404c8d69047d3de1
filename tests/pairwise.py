"""Combinations of the values of factors: all of some factors, or few that hold every pair of values of any two, which
is what the default suite runs of a large product."""

import itertools
from typing import Any


def pairwise(**factors: list[Any]) -> list[dict[str, Any]]:
    """Greedy and deterministic: each combination is the one of the product that covers most pairs still missing."""
    product = product_of(factors, *factors)
    missing = set().union(*map(_pairs, product))
    chosen = []
    while missing:
        best = max(product, key=lambda combination: len(_pairs(combination) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def product_of(factors: dict[str, list[Any]], *names: str) -> list[dict[str, Any]]:
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(factors[name] for name in names))]


def _pairs(combination: dict[str, Any]) -> set[tuple]:
    return set(itertools.combinations(combination.items(), 2))
