"""Tables of the collectives of a step.

    python -m lab.dryrun.collectives runs/a runs/b      compares two runs, real or dry

A real run writes its profile after the step `profile.collectives_step`, and a dry run writes it in its report.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from gpt.monitor.collectives import PROFILE
from gpt.monitor.console import make_console, print_table
from parallel.validation.errors import ConfigError, exit_on_config_error
from parallel.validation.files import FACTS_BYTES, read_limited
from zero.checkpoint.schema import COUNT, Schema, parse_json

REPORT = "report.json"  # of a dry run
ROW: Schema = {"axis": str, "op": str, "phase": str, "count": COUNT, "wire_bytes": float}  # what a comparison reads


def read_profile(path: Path) -> list[dict[str, Any]]:
    """Return the profile in a run's folder, or in a file. Raise ConfigError if there is none."""
    files = [path / PROFILE, path / REPORT] if path.is_dir() else [path]
    try:
        file = next(file for file in files if file.is_file())
        return parse_json(read_limited(file, FACTS_BYTES), {"collectives": [ROW]}, file)["collectives"]
    except (StopIteration, OSError, ConfigError) as error:
        reason = f" ({error})" if str(error) else ""
        raise ConfigError(
            f"{path} has no profile of collectives{reason}; name the folder of a real run past "
            f"its step profile.collectives_step, which writes {PROFILE}, or of a dry run, which writes {REPORT}"
        ) from error


def right_aligned(*headings: str) -> list[Column]:
    return [Column(heading, justify="right") for heading in headings]


def profile_table(rows: list[dict[str, Any]]) -> Table:
    headings = "axis\n(ranks)", "operation", "phase", "count", "message,\nMB", "sent,\nMB", "posi-\ntion", "block-\ning"
    table = Table(*headings, title="Collectives of a step, in the order of their first launch", title_justify="left")
    for row in rows:
        sizes = [int(size) / 1e6 for size in row["message_bytes"]]
        table.add_row(
            f"{row['axis']} ({row['group_size']})",
            row["op"],
            row["phase"],
            str(row["count"]),
            "-".join(f"{size:,.{int(size < 100)}f}" for size in dict.fromkeys((sizes[0], sizes[-1]))),
            f"{row['wire_bytes'] / 1e6:,.4f}",
            f"{row['first_position'] * 100:.0f}-{row['last_position']:.0%}",
            f"{row['blocking'] / row['count']:.0%}",
        )
    return table


def comparison_table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    """Return a table of the counts and bytes of the profiles of {name of a run: profile}.

    A row that a profile lacks has zeros.
    """
    figures = right_aligned(*(f"{figure},\n{name}" for figure in ("count", "MB sent") for name in runs))
    table = Table("axis", "operation", "phase", *figures, title="Collectives of a step", title_justify="left")
    profiles = [{(row["axis"], row["op"], row["phase"]): row for row in rows} for rows in runs.values()]
    for key in dict.fromkeys(key for rows in profiles for key in rows):
        rows = [side.get(key, {"count": 0, "wire_bytes": 0}) for side in profiles]
        counts, sent = [str(row["count"]) for row in rows], [f"{row['wire_bytes'] / 1e6:,.3f}" for row in rows]
        table.add_row(*key, *counts, *sent)
    return table


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.dryrun.collectives", description="Compare the collectives of two runs."
    )
    parser.add_argument("runs", nargs=2, type=Path, help="folders of runs, real or dry")
    paths = parser.parse_args(arguments).runs
    with exit_on_config_error():
        runs = {str(path): read_profile(path) for path in paths}
    print_table(make_console(), comparison_table(runs))


if __name__ == "__main__":
    main(sys.argv[1:])
