"""Calibration of at most three constants for each type of GPU, on two or three published rows that are named here.

    python -m lab.published.calibrate      prints the constants, to be copied into configs/clusters

Each type's constants start at published measurements (`Fit.before`). They are fitted by least squares of logarithms; of
constants that fit equally well, those that change the least are taken, so rows that say little about a constant leave
it where it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lab.measure.cluster import ClusterSpec
from lab.published.predictions import Prediction, cluster_of, predict
from lab.published.rows import Row, read_rows

ROUNDS, STEP = 6, 0.02  # Newton's steps; the change of a logarithm for a derivative
LARGEST_STEP = 0.25
LARGEST_FRACTION = 0.98


@dataclass(frozen=True)
class Fit:
    """The constants of a type of GPU that are fitted, their published values, and the rows they are fitted to."""

    files: tuple[str, ...]  # the cluster files that hold the constants
    before: dict[str, float]
    rows: tuple[str, ...]
    like: str | None = None  # the type whose ratios of fitted to published values apply where no row is known


# A100 and V100 products: 0.8 of the peak (Megatron-LM's largest, cuBLAS). H100: as in dgx-h100-estimated.yaml. Memory:
# what copies reach. Attention: FlashAttention reaches 25 to 40% of an A100's peak (FlashAttention-2, abstract),
# FlashAttention-2 35% of an H100's (FlashAttention-3, abstract).
FITS = {
    "A100": Fit(
        ("dgx-a100", "dgx-a100-40gb", "p4d"),
        {"gemm_fraction": 0.8, "memory_fraction": 0.88, "attention_fraction": 0.33},
        (
            "Megatron_v1.1_A100-24x1920-n1-s1024-b16",
            "MosaicML_A100-40-24x2048-n8-s2048-b8",  # this row and the next differ in attention alone
            "MosaicML_A100-40-24x2048-n8-s1024-b16",
        ),
    ),
    "H100": Fit(
        ("dgx-h100", "dgx-h200", "dgx-b200", "hgx-h100-ethernet"),
        {"gemm_fraction": 0.7, "memory_fraction": 0.9, "attention_fraction": 0.35},
        (
            "MosaicML_H100-24x2048-n8-s2048-b14",
            "MosaicML_H100-24x2048-n8-s1024-b18",
            "MosaicML_H100-48x7168-n16-s2048-b10",
        ),
        like="A100",
    ),
    "V100": Fit(
        ("dgx-2-nccl",),
        {"gemm_fraction": 0.8, "network_card_gb_per_second": 12.5},
        ("Megatron_v1.1_V100-24x1920-n1-s1024-b8", "DeepSpeed_V100-50x4096-n32-s1024-b1"),
    ),
}
CALIBRATED = {row for fit in FITS.values() for row in fit.rows}
Constants = dict[str, float]
PredictRow = Callable[[Row, Constants], Prediction]


def with_constants(cluster: ClusterSpec, constants: Constants) -> ClusterSpec:
    found: dict[str, Any] = {name: constants[name] for name in constants}
    return replace(cluster, **found)


def predict_with(row: Row, constants: Constants) -> Prediction:
    return predict(row, with_constants(cluster_of(row), constants))


def fitted(before: Constants, rows: Sequence[Row], predict_row: PredictRow = predict_with) -> Constants:
    """Return the constants that fit the rows; with fewer rows than constants, those that change the least."""

    def log_errors(logarithms: np.ndarray) -> np.ndarray:
        constants = dict(zip(before, np.exp(logarithms).tolist(), strict=True))
        return np.log1p(np.array([predict_row(row, constants).error for row in rows]))

    highest = [np.log(LARGEST_FRACTION) if name.endswith("_fraction") else np.inf for name in before]
    found = np.log(np.array(list(before.values())))
    for _ in range(ROUNDS if rows else 0):
        residual = log_errors(found)
        slopes = np.column_stack([(log_errors(found + STEP * unit) - residual) / STEP for unit in np.eye(len(found))])
        step = np.linalg.lstsq(slopes, -residual, rcond=1e-3)[0]
        found += np.clip(step, -LARGEST_STEP, LARGEST_STEP)
        found = np.minimum(found, highest)
    return dict(zip(before, np.exp(found).tolist(), strict=True))


def calibrated(gpu: str, without_source: str | None = None) -> Constants:
    """Return the fitted constants of a type of GPU, without the rows of one source if it is named."""
    fit, by_id = FITS[gpu], {row.id: row for row in read_rows()}
    rows = [row for row in map(by_id.__getitem__, fit.rows) if row.source != without_source]
    if rows or fit.like is None:
        return fitted(fit.before, rows)
    other, found = FITS[fit.like].before, calibrated(fit.like, without_source)
    return {name: value * found[name] / other[name] for name, value in fit.before.items()}


if __name__ == "__main__":
    for gpu, fit in FITS.items():
        print(f"# {gpu}: {', '.join(f'configs/clusters/{name}.yaml' for name in fit.files)}")
        for constant, value in calibrated(gpu).items():
            print(f"{constant}: {value:.3f}")
