"""Comparison of runs by their metrics.jsonl: a table, and one plot of all losses.

python -m gpt.monitor.compare RUN RUN ... [--plot FILE]
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.table import Table

from gpt.monitor.console import make_console, print_table
from gpt.monitor.plot import plot_losses
from gpt.run_folder.files import CONFIG, METRICS, read_steps
from parallel.errors import ConfigError, exit_on_config_error

Records = list[dict[str, Any]]
Figure = Callable[[Records], float | None]


def latest(key: str) -> Figure:
    """Return a function that takes records and returns the last value of a metric, or None if there is none."""
    return lambda records: next((record[key] for record in reversed(records) if key in record), None)


def typical(key: str) -> Figure:
    """Return a function that takes records and returns the median of a metric.

    The first logged step is left out, because it includes warm-up.
    """
    return lambda records: median(record[key] for record in records[1:] or records)


def highest(key: str) -> Figure:
    """Return a function that takes records and returns the maximum of a metric."""
    return lambda records: max(record[key] for record in records)


def in_millions(figure: Figure) -> Figure:
    """Return a function that takes records and returns a figure of them divided by 1e6."""
    return lambda records: None if (value := figure(records)) is None else value / 1e6


# heading, format, figure
COLUMNS: tuple[tuple[str, str, Figure], ...] = (
    ("step", ",", latest("step")),
    ("tokens, M", ",.2f", in_millions(latest("tokens"))),
    ("loss", ".4f", latest("loss")),
    ("validation", ".4f", latest("validation_loss")),
    ("tokens/s", ",.0f", typical("tokens_per_second")),
    ("TFLOPs/device", ".3g", typical("model_tflops_per_device")),
    ("peak MB", ",.0f", in_millions(highest("peak_allocated_bytes"))),
    ("data axis, MB", ",.2f", in_millions(typical("data_axis_bytes"))),
    ("tensor axis, MB", ",.2f", in_millions(typical("tensor_axis_bytes"))),
    ("skipped", ",", latest("skipped_steps")),
)


def read_runs(folders: list[Path]) -> dict[str, Records]:
    """Return the logged steps of each run, by name.

    A name is the end of the folder's path, with as many parts as make all names different. Raises ConfigError if a
    folder has no logged step.
    """
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(set(folders)):
        depth += 1
    runs = {}
    for folder in folders:
        records = read_steps(folder)
        if not records:
            raise ConfigError(f"{folder / METRICS} has no logged step; name the run.dir of a run that has trained")
        runs["/".join(folder.parts[-depth:])] = records
    return runs


def comparison_table(runs: dict[str, Records]) -> Table:
    """Return a table with one line for each run; speed, memory and traffic are per step and rank."""
    table = Table("run", title="Runs; memory and traffic per step and rank", title_justify="left")
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for name, records in runs.items():
        values = [(figure(records), form) for _, form, figure in COLUMNS]
        table.add_row(name, *("-" if value is None else format(value, form) for value, form in values))
    return table


def settings_table(runs: dict[str, dict[str, Any]]) -> Table:
    """Return a table of the settings that differ between runs, given as {name: settings}."""
    table = Table("setting", *runs, title="Settings that differ", title_justify="left")
    for name in sorted({name for of_run in runs.values() for name in of_run}):
        values = [str(of_run.get(name, "-")) for of_run in runs.values()]
        if len(set(values)) > 1:
            table.add_row(name, *values)
    return table


def read_settings(folder: Path) -> dict[str, Any]:
    """Return {dotted name: value} of a run's settings; nothing if its config.yaml is missing or cannot be read."""
    try:
        return _leaves(yaml.safe_load((folder / CONFIG).read_text()))
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    return {leaf: value for name, part in tree.items() for leaf, value in _leaves(part, f"{prefix}{name}.").items()}


def main(arguments: list[str]) -> None:
    """Print the table and write the plot."""
    parser = argparse.ArgumentParser(prog="python -m gpt.monitor.compare", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run.dir of a run")
    parser.add_argument(
        "--plot", type=Path, default=Path("compare.png"), help="file for the plot; by default compare.png"
    )
    options = parser.parse_args(arguments)
    runs = read_runs(options.runs)
    console = make_console()
    print_table(console, comparison_table(runs))
    found = {name: read_settings(folder) for name, folder in zip(runs, dict.fromkeys(options.runs), strict=True)}
    settings = {name: of_run for name, of_run in found.items() if of_run}
    if len(settings) > 1:
        print_table(console, settings_table(settings))
    plot_losses(runs, options.plot)
    console.print(f"{options.plot} shows their losses")


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
