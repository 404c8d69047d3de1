"""Profiles of the collectives of a step, for tuning the network.

    python -m gpt.monitor.collectives runs/a runs/b      compares the profiles of two runs, real or dry

A real run writes its profile after the step `profile.collectives_step`, and a dry run writes it in its report.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from gpt.monitor.console import make_console, print_table
from gpt.run_folder.files import written_if_possible
from parallel.comm_log import CommEvent, CommLog
from parallel.errors import ConfigError, exit_on_config_error
from parallel.torch_internals import OpOverload, UnguardedDispatchMode, runs_a_kernel

PROFILE_OF_RUN, PROFILE_OF_DRY_RUN = "collectives.json", "report.json"


def profile(events: list[CommEvent], step_length: float) -> list[dict[str, Any]]:
    """Return one row for each (axis, operation, phase), in the order of their first launch.

    `step_length` and the times of the events are counts of kernels. Positions are fractions of the step. `blocking`
    counts the collectives that overlap nothing: they were waited for before another kernel was launched.
    """
    groups: dict[tuple[str, str, str], list[tuple[int, CommEvent]]] = {}
    for order, event in enumerate(events):
        groups.setdefault((event.axis, event.op, event.phase), []).append((order, event))
    return [
        {
            "axis": axis,
            "op": op,
            "phase": phase,
            "group_size": found[0][1].group_size,
            "count": len(found),
            "message_bytes": _histogram(event for _, event in found),
            "wire_bytes": sum(event.wire_bytes for _, event in found),
            "first_order": found[0][0],
            "first_position": round(found[0][1].launched / step_length, 4) if step_length else 0.0,
            "last_position": round(found[-1][1].launched / step_length, 4) if step_length else 0.0,
            "blocking": sum(event.awaited == event.launched for _, event in found),
        }
        for (axis, op, phase), found in groups.items()
    ]


class KernelCounter(UnguardedDispatchMode):
    """A counter of the operations for which a GPU runs kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.count += runs_a_kernel(function)
        return output


@contextmanager
def profiled(log: CommLog, folder: Path | None) -> Iterator[None]:
    """Record the step inside this context, and write the profile of its collectives to `folder`, if there is one.

    The step takes longer, because Python intercepts every kernel to count it.
    """
    with KernelCounter() as kernels, log.keeping_events(lambda: kernels.count) as events:
        yield
    if folder is None:
        return
    rows = profile(events, kernels.count)
    with written_if_possible(folder / PROFILE_OF_RUN):
        (folder / PROFILE_OF_RUN).write_text(json.dumps({"collectives": rows}, indent=1) + "\n")


def read_profile(path: Path) -> list[dict[str, Any]]:
    """Return the profile in a run's folder, or in a file. Raise ConfigError if there is none."""
    files = [path / PROFILE_OF_RUN, path / PROFILE_OF_DRY_RUN] if path.is_dir() else [path]
    found = [file for file in files if file.is_file()]
    try:
        return json.loads(found[0].read_text())["collectives"]
    except (IndexError, OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path} has no profile of collectives; name the folder of a real run past its step profile."
            f"collectives_step, which writes {PROFILE_OF_RUN}, or of a dry run, which writes {PROFILE_OF_DRY_RUN}"
        ) from error


def _histogram(events: Any) -> dict[str, int]:
    """Return {bytes of a message: number of such messages}, in ascending order."""
    sizes = Counter(event.message_bytes for event in events)
    return {str(size): sizes[size] for size in sorted(sizes)}


def profile_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with one line for each row of a profile."""
    table = Table(title="Collectives of a step, in the order of their first launch", title_justify="left")
    for heading in ("axis\n(ranks)", "operation", "phase", "count", "message,\nMB", "posi-\ntion", "block-\ning"):
        table.add_column(heading)
    for row in rows:
        sizes = [int(size) / 1e6 for size in row["message_bytes"]]
        table.add_row(
            f"{row['axis']} ({row['group_size']})",
            row["op"],
            row["phase"],
            str(row["count"]),
            "-".join(f"{size:,.{int(size < 100)}f}" for size in dict.fromkeys((sizes[0], sizes[-1]))),
            f"{row['first_position'] * 100:.0f}-{row['last_position']:.0%}",
            f"{row['blocking'] / row['count']:.0%}",
        )
    return table


def comparison_table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    """Return a table of the counts and bytes of the profiles of {name of a run: profile}.

    A row that a profile lacks has zeros.
    """
    table = Table("axis", "operation", "phase", title="Collectives of a step", title_justify="left")
    for figure in ("count", "MB sent"):
        for name in runs:
            table.add_column(f"{figure},\n{name}", justify="right")
    profiles = [{(row["axis"], row["op"], row["phase"]): row for row in rows} for rows in runs.values()]
    for key in dict.fromkeys(key for rows in profiles for key in rows):
        rows = [side.get(key, {"count": 0, "wire_bytes": 0}) for side in profiles]
        counts, sent = [str(row["count"]) for row in rows], [f"{row['wire_bytes'] / 1e6:,.3f}" for row in rows]
        table.add_row(*key, *counts, *sent)
    return table


def main(arguments: list[str]) -> None:
    """Print the comparison of two runs."""
    parser = argparse.ArgumentParser(
        prog="python -m gpt.monitor.collectives", description="Compare the collectives of two runs."
    )
    parser.add_argument("runs", nargs=2, type=Path, help="folders of runs, real or dry")
    paths = parser.parse_args(arguments).runs
    with exit_on_config_error():
        runs = {str(path): read_profile(path) for path in paths}
    print_table(make_console(), comparison_table(runs))


if __name__ == "__main__":
    main(sys.argv[1:])
