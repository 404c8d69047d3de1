"""Calibration of two constants of configs/clusters/dgx-2.yaml, by least squares over three rows of Figure 2.

    python -m lab.paper.calibrate      prints the constants, to be copied into the file

The two rows of 1.5B determine `gemm_fraction`, because they mostly compute. The baseline of 60B determines
`node_fraction`, because it mostly waits for the network. No other row of the paper is used.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from lab.measure.cluster import ClusterSpec
from lab.paper.experiments import CLUSTER_FILE, Experiment, experiments, parsed
from lab.planner.depth import ShallowRun, extrapolate, shallow_runs

CALIBRATED = "1.5b-zero-400", "1.5b-baseline-400", "60b-baseline-384"  # rows of Figure 2
FITTED = "gemm_fraction", "node_fraction"
GRID_POINTS, ROUNDS = 9, 10  # points of a grid along each constant, and number of grids


def fit(error: Callable[[tuple[float, ...]], float], first: tuple[float, ...], spread: float) -> tuple[float, ...]:
    """Return the two constants with the smallest error, searched on ever finer grids around the best point so far.

    A grid multiplies each constant by factors from 1 / spread to spread; the next grid's spread is the square root.
    """
    best = first
    for _ in range(ROUNDS):
        factors = [spread ** (2 * step / (GRID_POINTS - 1) - 1) for step in range(GRID_POINTS)]
        points = [tuple(b * f for b, f in zip(best, chosen, strict=True)) for chosen in product(factors, repeat=2)]
        best, spread = min(points, key=error), math.sqrt(spread)
    return best


def with_constants(cluster: ClusterSpec, constants: Sequence[float]) -> ClusterSpec:
    found: dict[str, Any] = dict(zip(FITTED, constants, strict=True))
    return replace(cluster, **found)


def calibrated(cluster: ClusterSpec) -> ClusterSpec:
    """Return `cluster` with the constants that fit the three rows best."""
    rows = [
        (experiment, shallow_runs(parsed(experiment.settings(), experiment.num_gpus)))
        for experiment in calibrated_rows()
    ]

    def error(constants: tuple[float, ...]) -> float:
        chosen = with_constants(cluster, constants)
        return sum(math.log(relative_tflops(experiment, runs, chosen)) ** 2 for experiment, runs in rows)

    found = with_constants(cluster, fit(error, (0.5, 0.5), 2.0))
    for experiment, runs in rows:
        print(f"{experiment.name}: {relative_tflops(experiment, runs, found) - 1:+.1%}")
    return found


def calibrated_rows() -> Iterator[Experiment]:
    return (experiment for experiment in experiments("figure2") if experiment.name in CALIBRATED)


def relative_tflops(experiment: Experiment, runs: tuple[ShallowRun, ShallowRun], cluster: ClusterSpec) -> float:
    """Return the projected rate divided by the one that the paper prints."""
    seconds = extrapolate(runs, cluster).at(int(experiment.row["layers"])).seconds
    assert experiment.measured_tflops is not None
    return experiment.tflops(seconds) / experiment.measured_tflops


if __name__ == "__main__":
    chosen = calibrated(ClusterSpec.load(CLUSTER_FILE))
    for name in FITTED:
        print(f"{name}: {getattr(chosen, name):.3f}")
