"""Prediction of any rows in the columns of configs/published/rows.csv.

    python -m lab.published.predict ROWS.csv --output OUT.csv [--jobs 2]

OUT.csv has, for each row, its id, the projected seconds of a step, the projected TFLOPs a GPU on the row's basis, the
projected tokens a second a GPU, the peak memory of a GPU in GB, and 1 if that fits. Columns that only
configs/published/fp8_rows.csv has may be left out. Recordings of dry runs are kept in runs/published.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from lab.planner.depth import path_of
from lab.planner.search import show_progress
from lab.published import predictions
from lab.published.predictions import Prediction, by_closed_form, predict, recorded_settings, runs_of
from lab.published.rows import Row, read_rows
from parallel.errors import ConfigError, exit_on_config_error

COLUMNS = "id", "projected_seconds", "projected_tflops", "tokens_per_second_per_gpu", "peak_gb", "fits"
NUM_JOBS = 2


def record_all(rows: Sequence[Row], num_jobs: int) -> None:
    """Record the dry runs that are not kept yet, in several processes, and print the progress."""
    missing = [row for row in rows if not is_kept(row)]
    if not missing:
        return
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        for number, (row, failure) in enumerate(zip(missing, pool.map(_record, missing), strict=True), 1):
            show_progress(f"dry run {number} of {len(missing)}: {row.id}{failure}")


def is_kept(row: Row) -> bool:
    """Return True if there are files of the dry runs of a row, or cannot be any."""
    try:
        return path_of(recorded_settings(row), predictions.KEPT_RUNS).exists()
    except ConfigError:
        return True


def _record(row: Row) -> str:
    """Record the dry runs of a row; return what has failed."""
    try:
        runs_of(row)
    except Exception as error:  # the other rows are recorded
        return f": {type(error).__name__}: {error}"
    return ""


def predicted(row: Row) -> Prediction:
    """Return the prediction of a row; by a closed form, with a warning, if this project cannot run the row."""
    try:
        return predict(row)
    except Exception as error:  # whatever a strange row makes a dry run raise: the other rows are still predicted
        show_progress(
            f"{row.id} is predicted by a closed form, because its dry run fails: {str(error).splitlines()[:1]}"
        )
        return by_closed_form(row)


def cells(found: Prediction) -> list[object]:
    """Return the line of OUT.csv."""
    speed = f"{found.tflops:.2f}", f"{found.row.tokens_per_second(found.seconds):.2f}"
    return [found.row.id, f"{found.seconds:.6g}", *speed, f"{found.peak_bytes / 1e9:.2f}", int(found.fits)]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.published.predict", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("rows", type=Path, help="CSV file of rows")
    parser.add_argument("--output", type=Path, required=True, help="CSV file to write")
    parser.add_argument("--jobs", type=int, default=NUM_JOBS, help="processes that record dry runs")
    options = parser.parse_args(arguments)
    rows = read_rows(options.rows)
    record_all(rows, options.jobs)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *(cells(predicted(row)) for row in rows)])
    show_progress(f"{options.output} has {len(rows)} rows")


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
