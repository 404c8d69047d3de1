"""Comparison of runs by their metrics.jsonl: a table, and one plot of all losses.

python -m gpt.monitor.compare RUN RUN ... [--plot FILE]
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from gpt.formats.config_files import read_section
from gpt.monitor.console import make_console, print_table
from gpt.monitor.plot import plot_losses
from gpt.run_folder.files import CONFIG, METRICS, read_steps
from gpt.settings.tree import dotted
from parallel.validation.errors import ConfigError, exit_on_config_error, first_line

Records = list[dict[str, Any]]


def figures_of(records: Records) -> dict[str, str]:
    """Return the figures of a run by their headings; speed, memory and traffic are per step and rank.

    Those of a typical step are medians without the first logged one, which includes warm-up.
    """

    def typical(key: str) -> float:
        return median(record[key] for record in records[1:] or records)

    last = records[-1]
    validation = next((record["validation_loss"] for record in reversed(records) if "validation_loss" in record), None)
    return {
        "step": f"{last['step']:,}",
        "tokens, M": f"{last['tokens'] / 1e6:,.2f}",
        "loss": f"{last['loss']:.4f}",
        "validation": "-" if validation is None else f"{validation:.4f}",
        "tokens/s": f"{typical('tokens_per_second'):,.0f}",
        "TFLOPs/device": f"{typical('model_tflops_per_device'):.3g}",
        "peak MB": f"{max(record['peak_allocated_bytes'] for record in records) / 1e6:,.0f}",
        "data axis, MB": f"{typical('data_axis_bytes') / 1e6:,.2f}",
        "tensor axis, MB": f"{typical('tensor_axis_bytes') / 1e6:,.2f}",
        "skipped": f"{last['skipped_steps']:,}",
    }


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
    """Return a table with one line for each run."""
    table = Table("run", title="Runs; memory and traffic per step and rank", title_justify="left")
    rows = {name: figures_of(records) for name, records in runs.items()}
    for heading in next(iter(rows.values())):
        table.add_column(heading, justify="right")
    for name, figures in rows.items():
        table.add_row(name, *figures.values())
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
        return dotted(read_section(folder / CONFIG, CONFIG))
    except ConfigError:
        return {}


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
    try:
        plot_losses(runs, options.plot)
    except (OSError, ValueError) as error:  # ValueError: the end of its name is no format
        raise ConfigError(f"--plot={options.plot} cannot be written ({first_line(error)}); choose another") from error
    console.print(f"{options.plot} shows their losses")


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
