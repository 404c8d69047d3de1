"""Calibration of at most three constants for each type of GPU, on published rows that are named.

    python -m lab.published.calibrate      prints the constants, to be copied into configs/clusters

Each type's constants start at published measurements (`Fit.before`).
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import yaml

from lab.measure.fit import Constants, fitted, with_constants
from lab.published.predict import cluster_of, predict
from lab.published.rows import LATE_ROWS, read_rows


@dataclass(frozen=True)
class Fit:
    """The constants of a type of GPU that are fitted, their published values, and the rows they are fitted to."""

    files: list[str]  # the cluster files that hold the constants
    before: Constants
    rows: list[str]
    like: str | None = None  # the type whose ratios of fitted to published values apply where no row is known
    given: str | None = None  # the fit whose constants are fitted before these


def read_fits(name: str) -> dict[str, Fit]:
    found = yaml.safe_load(Path(__file__).with_name(name).read_text())
    return {gpu: Fit(**values) for gpu, values in found.items()}


FITS, LATE_FITS = read_fits("fits.yaml"), read_fits("late_fits.yaml")
ALL_FITS = FITS | LATE_FITS
CALIBRATED = {row for fit in ALL_FITS.values() for row in fit.rows}


@functools.cache
def calibrated(gpu: str, without_source: str | None = None) -> Constants:
    """Return the fitted constants of a type of GPU, without the rows of one source if it is named."""
    fit, by_id = ALL_FITS[gpu], {row.id: row for row in [*read_rows(), *read_rows(LATE_ROWS)]}
    given = calibrated(fit.given, without_source) if fit.given else {}
    rows = [row for row in map(by_id.__getitem__, fit.rows) if row.source != without_source]
    if rows or fit.like is None:
        return fitted(
            fit.before,
            lambda found: [predict(row, with_constants(cluster_of(row), given | found)).error for row in rows],
        )
    other, found = FITS[fit.like].before, calibrated(fit.like, without_source)
    return {name: value * found[name] / other[name] for name, value in fit.before.items()}


if __name__ == "__main__":
    for gpu, fit in ALL_FITS.items():
        print(f"# {gpu}: {', '.join(f'configs/clusters/{name}.yaml' for name in fit.files)}")
        for constant, value in calibrated(gpu).items():
            print(f"{constant}: {value:.3f}")
