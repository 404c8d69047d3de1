"""Write the figures of docs/published/planner.md: published layouts beside those that the planner finds.

    python -m lab.published.planner [ROW ...]

Both run in this program, with its buckets and overlap, and on the same batch: only stage, tensor size, micro-batch,
activation store and offload differ. The planner is not told the published layout. Dry runs are kept in runs/published:
the first time takes minutes, later ones half a minute.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from gpt.monitor.units import count
from lab.dryrun.run_cost import steps_for
from lab.pages.markdown import projected_here, table, write_blocks
from lab.planner.depth import Estimate
from lab.planner.layouts import CandidateLayout
from lab.planner.search import DEFAULT_TO_VERIFY, Search
from lab.published import predict
from lab.published.predict import NUM_JOBS, cluster_of
from lab.published.row_settings import settings_of, settings_tree
from lab.published.rows import ROOT, Row, read_rows
from lab.published.sources import FOUND
from parallel.validation.errors import ConfigError, exit_on_config_error

PAGE = ROOT / "docs/published/planner.md"
ROWS: list[str] = FOUND["compared"]
TOKENS_A_PARAMETER = 20
OF_THE_PROGRAM = "bucket_numel", "overlap", "overlap_gather"  # settings of ZeRO that imitate the measured program


@dataclass(frozen=True)
class Comparison:
    """The published layout of a row and the best that the planner finds, each with its estimate in this program."""

    row: Row
    search: Search
    published: CandidateLayout
    of_published: Estimate
    best: CandidateLayout
    of_best: Estimate

    @property
    def ratio(self) -> float:
        """The time of the planner's layout, as a multiple of that of the published one."""
        return self.of_best.seconds / self.of_published.seconds

    def cells(self) -> list[object]:
        """Return the row of the table."""
        row, cluster = self.row, self.search.cluster
        too_much = "" if self.search.fits(self.of_published) else " too much"
        peaks = [f"{one.device_peak_bytes / 1e9:.1f}" for one in (self.of_published, self.of_best)]
        seconds = [f"{one.seconds:#.3g}" for one in (self.of_published, self.of_best)]
        fits = f"{'yes' if self.search.fits(self.of_best) else 'no'}, of {cluster.usable_gpu_bytes / 1e9:.1f}"
        costs = self.search.cost(self.of_published), f"{self.search.cost(self.of_best).gpu_hours:,.0f} GPU hours"
        run = row.id, f"{row.gpus}, {cluster.name}", count(row.parameters), f"{row.published_tflops:g}"
        of_published = self.published, seconds[0], f"{peaks[0]}{too_much}"
        return [*run, *of_published, self.best, seconds[1], peaks[1], f"{self.ratio:.3f}", fits, *costs]


def search_of(row: Row, num_to_verify: int = DEFAULT_TO_VERIFY) -> Search:
    """Return the search of a row's run in this program: its full depth and batch, and TOKENS_A_PARAMETER."""
    tree = settings_tree(row)
    tree["zero"] = {name: value for name, value in tree["zero"].items() if name not in OF_THE_PROGRAM}
    settings = settings_of(tree, row.gpus)
    steps = steps_for(TOKENS_A_PARAMETER * row.parameters, settings)
    settings = replace(settings, train=replace(settings.train, steps=steps))
    kept = predict.KEPT_RUNS
    return Search(settings, cluster_of(row), row.gpus, num_to_verify=num_to_verify, kept_runs=kept)


def published_layout(row: Row) -> CandidateLayout:
    """Return the layout that a row publishes: its tensor size, stage, activation store, micro-batch and offload."""
    settings = search_of(row).settings
    store = settings.activations.store
    assert store != "auto"
    return CandidateLayout(row.tp, row.stage, store, row.micro_batch_size, settings.offload.mode)


def compare(row: Row, num_to_verify: int = DEFAULT_TO_VERIFY) -> Comparison:
    """Return the comparison of a row. Raise ConfigError if no layout fits."""
    search, published = search_of(row, num_to_verify), published_layout(row)
    verified = search.verify(search.plan())
    fitting = search.fitting(verified)
    if not fitting:
        raise ConfigError(f"row {row.id}: none of {len(verified)} layouts fits in a dry run; choose another row")
    best = min(fitting, key=lambda layout: fitting[layout].seconds)
    return Comparison(row, search, published, search.estimate(published), best, fitting[best])


def lines(comparisons: Sequence[Comparison]) -> list[str]:
    headings = "row, GPUs, parameters, measured TFLOPs, published layout, s, GB, planner's layout, s, GB"
    more = "its time / published, it fits, published layout would cost, planner's"
    return table(f"{headings}, {more}".split(", "), [one.cells() for one in comparisons])


def blocks(comparisons: Sequence[Comparison]) -> dict[str, list[str]]:
    slowest = max(one.ratio for one in comparisons)
    num_fitting = sum(one.search.fits(one.of_best) for one in comparisons)
    summary = (
        f"The planner's layout takes at most {slowest:.3f} of the time of the published one, and {num_fitting} of "
        f"{len(comparisons)} fit\nthe memory that CUDA and NCCL leave. A run costs what {TOKENS_A_PARAMETER} tokens a "
        "parameter take.\n"
    )
    return {"layouts": [summary, *lines(comparisons), f"\n{projected_here()}"]}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.published.planner", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    by_id = {row.id: row for row in read_rows()}
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows of configs/published/rows.csv; by default eight")
    names = parser.parse_args(arguments).rows or ROWS
    if unknown := [name for name in names if name not in by_id]:
        raise ConfigError(f"ROW={unknown[0]} is none of the {len(by_id)} rows of configs/published/rows.csv; name one")
    with ProcessPoolExecutor(NUM_JOBS, get_context("spawn")) as pool:
        write_blocks(PAGE, blocks(list(pool.map(compare, [by_id[name] for name in names]))))


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
