"""Every pair of values of any two factors, in few combinations: what the default suite runs of a large product."""

import itertools
from typing import Any


def pairwise(**factors: list[Any]) -> list[dict[str, Any]]:
    """Greedy and deterministic: each combination is the one of the product that covers most pairs still missing."""
    product = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    missing = set().union(*map(_pairs, product))
    chosen = []
    while missing:
        best = max(product, key=lambda combination: len(_pairs(combination) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(combination: dict[str, Any]) -> set[tuple]:
    return set(itertools.combinations(combination.items(), 2))
