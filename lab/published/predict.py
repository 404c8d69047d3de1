"""Prediction of rows: their recordings, projected on their clusters as the programs that were measured.

    python -m lab.published.predict ROWS.csv --output OUT.csv [--jobs 2]

OUT.csv has, for each row, its id, the projected seconds of a step, the projected TFLOPs a GPU on the row's basis, the
projected tokens a second a GPU, the peak memory of a GPU in GB, and 1 if that fits. Columns that only
configs/published/fp8_rows.csv has may be left out. Recordings of dry runs are kept in runs/published.
"""

import argparse
import csv
import functools
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from gpt.settings.settings import Settings
from lab.dryrun.costs.program import Program, as_program, cluster_for, with_keys_of_a_context
from lab.dryrun.costs.quantized import gathered_quantized, quantized
from lab.measure.cluster import ClusterSpec
from lab.planner.depth import ShallowRun, extrapolate, path_of, shallow_runs
from lab.planner.search import show_progress
from lab.published.row_settings import padded_vocab, recorded_micro_batches, settings_of, settings_tree
from lab.published.rows import ROOT, Row, is_fsdp, read_rows
from lab.published.sources import GPUS_OF_A_TRAY, cluster_name, program_of, quantization_of
from parallel.validation.errors import ConfigError, exit_on_config_error
from zero.core.partition.stage import STAGES
from zero.formulas.memory import formula

CLUSTERS, KEPT_RUNS = ROOT / "configs/clusters", ROOT / "runs/published"
GBPS_PER_GB_PER_SECOND = 8
AXES_OF_CODES = "data", "shard", "tensor"  # along which weights and activations are gathered in FP8, if they are

HALF_BYTES, FULL_SHARD = 2, 3  # of an element; the stage of FSDP's FULL_SHARD
TYPICAL_FRACTION = 0.45  # of the peak rate, that large models reach
COLUMNS = "id", "projected_seconds", "projected_tflops", "tokens_per_second_per_gpu", "peak_gb", "fits"
NUM_JOBS = 2


@dataclass(frozen=True)
class Prediction:
    """The projected step of a row, and the memory of one of its GPUs."""

    row: Row
    seconds: float
    peak_bytes: float
    fits: bool

    @property
    def tflops(self) -> float:
        return self.row.tflops(self.seconds)

    @property
    def error(self) -> float:
        return self.tflops / self.row.published_tflops - 1


@functools.cache
def runs_of(row: Row) -> tuple[ShallowRun, ShallowRun]:
    """Return the dry runs of a row, which are kept in KEPT_RUNS."""
    return shallow_runs(recorded_settings(row), KEPT_RUNS)


def recorded_settings(row: Row) -> Settings:
    return settings_of(settings_tree(row, recorded_micro_batches(row)), row.tp * row.data_size)


@functools.cache
def load_cluster(name: str) -> ClusterSpec:
    return ClusterSpec.load(CLUSTERS / f"{name}.yaml")


def cluster_of(row: Row) -> ClusterSpec:
    """Return the cluster of a row, with the network that the row states."""
    cluster = load_cluster(cluster_name(row))
    num_stated = cluster.gpus_per_node / GPUS_OF_A_TRAY.get(cluster.name, cluster.gpus_per_node)
    node_rate = row.node_gbps / GBPS_PER_GB_PER_SECOND * num_stated or cluster.node_gb_per_second
    num_cards = cluster.node_gb_per_second / cluster.network_card_gb_per_second
    return replace(cluster, node_gb_per_second=node_rate, network_card_gb_per_second=node_rate / num_cards)


def predict(row: Row, cluster: ClusterSpec | None = None, program: Program | None = None) -> Prediction:
    """Return the prediction of a row, by default on its cluster and as its program."""
    program = program or program_of(row)
    cluster = cluster_for(cluster or cluster_of(row), program)
    found = extrapolate(runs_as(row, program), cluster).at(row.layers / row.pipeline)
    peak = found.device_peak_bytes - bytes_saved(row)
    # Without interleaving, a pipeline is filled and emptied in as many micro-batches as it has other stages.
    seconds = found.seconds * (1 + (row.pipeline - 1) / row.num_micro_batches)
    return Prediction(row, seconds, peak, peak <= cluster.usable_gpu_bytes)


@functools.cache
def runs_as(row: Row, program: Program) -> tuple[ShallowRun, ShallowRun]:
    first, second = (of_program(run, row, program) for run in runs_of(row))
    return first, second


def of_program(run: ShallowRun, row: Row, program: Program) -> ShallowRun:
    """Return a dry run as the program would run it, with all micro-batches of the row."""
    kernels, events = as_program(run.kernels, run.events, program)
    kernels = [with_keys_of_a_context(kernel, row.context_parallel) for kernel in kernels]
    if how := quantization_of(row):
        kernels, events = quantized(kernels, events, how)
        if row.fp8_gather:
            embedding_bytes = HALF_BYTES * padded_vocab(row) * row.hidden
            events = gathered_quantized(events, how, AXES_OF_CODES, embedding_bytes)
    num_left_out = row.num_micro_batches - recorded_micro_batches(row)
    return replace(run, kernels=kernels, events=events, num_left_out=num_left_out)


def bytes_saved(row: Row) -> float:
    """Return the memory that the measured program needs less than this one.

    FSDP shards parameters in fp32, which are their own master weights; here there are half-precision shards beside.
    """
    return HALF_BYTES * row.parameters / row.data_size if is_fsdp(row) and row.stage == FULL_SHARD else 0.0


def by_closed_form(row: Row) -> Prediction:
    """Return a rough prediction of a row without a dry run: FLOPs at a typical rate, states and checkpoints."""
    cluster = cluster_of(row)
    seconds = row.flops / (row.tp * row.data_size) / (TYPICAL_FRACTION * cluster.peak_half_tflops * 1e12)
    states = formula(STAGES[min(max(row.stage, 0), FULL_SHARD)], row.parameters / row.tp, row.data_size).total
    peak = states + HALF_BYTES * row.layers * row.micro_batch_size * row.seq * row.hidden
    return Prediction(row, seconds, peak, peak <= cluster.usable_gpu_bytes)


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
        return path_of(recorded_settings(row), KEPT_RUNS).exists()
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
