"""Combinations of the values of several factors: all of them, or a few that contain every pair of values.

The default suite runs the few; the complete product is marked `full`.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lab.acceptance.cases import covering


def pairwise(**factors: list[Any]) -> list[dict[str, Any]]:
    """Choose a few combinations that contain every pair of values."""
    return covering(factors, 2)


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
