"""Write the figures of docs/published/planner.md: published layouts beside those that the planner finds.

    python -m lab.published.planner [ROW ...] [--output PAGE]

Both run in this program, with its buckets and overlap, and on the same batch: only stage, tensor size, micro-batch,
activation store and offload differ. The planner is not told the published layout. Dry runs are kept in runs/published:
the first time takes minutes, later ones half a minute.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from gpt.monitor.units import count
from gpt.settings.settings import Settings
from lab.dryrun.run_cost import RunCost
from lab.pages.markdown import table, with_blocks
from lab.planner.closed_forms import make_plan
from lab.planner.depth import Estimate
from lab.planner.layouts import CandidateLayout
from lab.planner.search import DEFAULT_TO_VERIFY, estimate_fits, estimate_layout, verify
from lab.published import predictions
from lab.published.predict import NUM_JOBS
from lab.published.predictions import cluster_of
from lab.published.row_settings import settings_of, settings_tree
from lab.published.rows import ROOT, Row, read_rows
from lab.published.sources import FOUND
from parallel.errors import ConfigError, exit_on_config_error

PAGE = ROOT / "docs/published/planner.md"
ROWS: list[str] = FOUND["compared"]
TOKENS_A_PARAMETER = 20
OF_THE_PROGRAM = "bucket_numel", "overlap", "overlap_gather"  # settings of ZeRO that imitate the measured program


@dataclass(frozen=True)
class Comparison:
    """The published layout of a row and the best that the planner finds, each with its estimate in this program."""

    row: Row
    published: CandidateLayout
    of_published: Estimate
    best: CandidateLayout
    of_best: Estimate

    @property
    def ratio(self) -> float:
        """The time of the planner's layout, as a multiple of that of the published one."""
        return self.of_best.seconds / self.of_published.seconds

    @property
    def fits(self) -> bool:
        """True if the planner's layout fits beside what CUDA and NCCL take."""
        return estimate_fits(self.of_best, cluster_of(self.row))

    def cost(self, estimate: Estimate) -> RunCost:
        """Return what a run of TOKENS_A_PARAMETER costs with one of the layouts."""
        settings = settings_of_run(self.row)
        batch_tokens = settings.train.global_batch_size * self.row.seq
        steps = math.ceil(TOKENS_A_PARAMETER * self.row.parameters / batch_tokens)
        settings = replace(settings, train=replace(settings.train, steps=steps))
        return RunCost.of(settings, estimate.seconds, self.row.gpus, cluster_of(self.row))


def settings_of_run(row: Row) -> Settings:
    """Return the settings of a row's run in this program, at its full depth and batch."""
    tree = settings_tree(row)
    tree["zero"] = {name: value for name, value in tree["zero"].items() if name not in OF_THE_PROGRAM}
    return settings_of(tree, row.gpus)


def published_layout(row: Row) -> CandidateLayout:
    """Return the layout that a row publishes: its tensor size, stage, activation store, micro-batch and offload."""
    settings = settings_of_run(row)
    store = settings.activations.store
    assert store != "auto"
    return CandidateLayout(row.tp, row.stage, store, row.micro_batch_size, settings.offload.mode)


def estimate_of(row: Row, layout: CandidateLayout) -> Estimate:
    return estimate_layout(layout, settings_of_run(row), cluster_of(row), row.gpus, predictions.KEPT_RUNS)


def compare(row: Row, num_to_verify: int = DEFAULT_TO_VERIFY) -> Comparison:
    """Return the comparison of a row. Raise ConfigError if no layout fits."""
    settings, cluster = settings_of_run(row), cluster_of(row)
    plan = make_plan(settings, cluster, row.gpus)
    verified = verify(plan, partial(estimate_of, row), cluster, num_to_verify)
    fitting = {layout: found for layout, found in verified.items() if estimate_fits(found, cluster)}
    if not fitting:
        raise ConfigError(f"row {row.id}: none of {len(verified)} layouts fits in a dry run; choose another row")
    best, published = min(fitting, key=lambda layout: fitting[layout].seconds), published_layout(row)
    return Comparison(row, published, estimate_of(row, published), best, fitting[best])


def lines(comparisons: Sequence[Comparison]) -> list[str]:
    rows = []
    for one in comparisons:
        row, cluster = one.row, cluster_of(one.row)
        too_much = "" if estimate_fits(one.of_published, cluster) else " too much"
        of_published = one.published, f"{one.of_published.seconds:#.3g}"
        of_best = one.best, f"{one.of_best.seconds:#.3g}", f"{one.of_best.device_peak_bytes / 1e9:.1f}"
        fits = f"{'yes' if one.fits else 'no'}, of {cluster.usable_gpu_bytes / 1e9:.1f}"
        costs = one.cost(one.of_published), f"{one.cost(one.of_best).gpu_hours:,.0f} GPU hours"
        run = row.id, f"{row.gpus}, {cluster.name}", count(row.parameters), f"{row.published_tflops:g}"
        peak = f"{one.of_published.device_peak_bytes / 1e9:.1f}{too_much}"
        rows.append([*run, *of_published, peak, *of_best, f"{one.ratio:.3f}", fits, *costs])
    headings = "row, GPUs, parameters, measured TFLOPs, published layout, s, GB, planner's layout, s, GB"
    more = "its time / published, it fits, published layout would cost, planner's"
    return table(f"{headings}, {more}".split(", "), rows)


def page(comparisons: Sequence[Comparison]) -> str:
    slowest = max(one.ratio for one in comparisons)
    num_fitting = sum(one.fits for one in comparisons)
    summary = (
        f"The planner's layout takes at most {slowest:.3f} of the time of the published one, and {num_fitting} of "
        f"{len(comparisons)} fit\nthe memory that CUDA and NCCL leave. A run costs what {TOKENS_A_PARAMETER} tokens a "
        "parameter take.\n"
    )
    made = f"\nProjected on {date.today()}: {os.cpu_count()} CPU cores, torch {torch.__version__}, no GPU."
    return with_blocks(PAGE.read_text(), {"layouts": [summary, *lines(comparisons), made]})


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.published.planner", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    by_id = {row.id: row for row in read_rows()}
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows of configs/published/rows.csv; by default eight")
    parser.add_argument("--output", type=Path, default=PAGE, help="page to write")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.rows if name not in by_id]:
        raise ConfigError(f"ROW={unknown[0]} is none of the {len(by_id)} rows of configs/published/rows.csv; name one")
    with ProcessPoolExecutor(NUM_JOBS, get_context("spawn")) as pool:
        comparisons = list(pool.map(compare, [by_id[name] for name in options.rows or ROWS]))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(page(comparisons))
    print(options.output)


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
