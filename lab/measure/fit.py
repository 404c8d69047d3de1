"""Calibration of constants of a cluster: least squares of the logarithms of errors.

Of constants that fit equally well, those that change the least are taken, so rows that say little about a constant
leave it where it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lab.measure.cluster import ClusterSpec

ROUNDS, STEP = 6, 0.02  # Newton's steps; the change of a logarithm for a derivative
LARGEST_STEP = 0.25
LARGEST_FRACTION = 0.98

Constants = dict[str, float]  # of a cluster, by name


def with_constants(cluster: ClusterSpec, constants: Constants) -> ClusterSpec:
    found: dict[str, Any] = {**constants}
    return replace(cluster, **found)


def fitted(before: Constants, errors: Callable[[Constants], Sequence[float]]) -> Constants:
    """Return the constants with the smallest relative errors, which may be none; `before` is where they start."""

    def log_errors(logarithms: np.ndarray) -> np.ndarray:
        return np.log1p(np.array(errors(dict(zip(before, np.exp(logarithms).tolist(), strict=True)))))

    highest = [np.log(LARGEST_FRACTION) if name.endswith("_fraction") else np.inf for name in before]
    found = np.log(np.array(list(before.values())))
    for _ in range(ROUNDS):
        residual = log_errors(found)
        slopes = np.column_stack([(log_errors(found + STEP * unit) - residual) / STEP for unit in np.eye(len(found))])
        step = np.linalg.lstsq(slopes, -residual, rcond=1e-3)[0]
        found += np.clip(step, -LARGEST_STEP, LARGEST_STEP)
        found = np.minimum(found, highest)
    return dict(zip(before, np.exp(found).tolist(), strict=True))
