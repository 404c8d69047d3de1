"""Prove that the tests notice what they are for: break the code in one place at a time, and see which test fails.

    python -m scripts.mutants                            all mutants without a wait, about 15 seconds each
    python -m scripts.mutants zero/offload --list        what would be broken below a folder, or in a file
    python -m scripts.mutants --sample 10 --seed 3       some of them

Each mutant is made in a copy of the working tree, in a temporary folder. It survives if no detector fails. Survivors
that change nothing are listed in `scripts/mutants/equivalent.toml`, each with its reason, and are not run.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts.mutants import waits
from scripts.mutants.mutant import Mutant, SourceFile
from scripts.mutants.runner import run_tests

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")

# Kinds of mutants: a module with FOLDERS, WITHOUT and `mutants(file)`.
KINDS: dict[str, ModuleType] = {"waits": waits}

EQUALS = "tests/distributed/zero/test_zero_equals_one_process.py"

# Tests that run on each mutant, until one fails; the cheapest first.
DETECTORS: dict[str, list[str]] = {
    "deferred": ["tests/distributed/deferred/test_reports.py", "tests/distributed/deferred"],
    "checker": [
        "tests/unit/parallel/instruments/test_stream_checker.py",
        "tests/unit/zero/offload/test_placement.py",
        "tests/distributed/gpt/test_streams.py",
    ],
    "order": ["tests/distributed/gpt/test_launch_order.py", "tests/distributed/zero/test_overlapped_gathers.py"],
    # What runs only on gloo, at once: its own gather and scatter, and a reduction between groups behind another.
    "gloo": [
        "tests/distributed/parallel/test_axis.py",
        f"{EQUALS}::test_sharding_inside_groups_and_replicating_across_equals_one_process",
    ],
}

SURVIVED, EQUIVALENT_TO = "SURVIVED", "equivalent"


@dataclass(frozen=True)
class Outcome:
    """The fate of a mutant: the detector that failed, with the name of its test, or `SURVIVED`."""

    mutant: Mutant
    verdict: str
    detail: str = ""


def main() -> int:
    options = _options()
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    found = list(all_mutants(options.kind, options.paths))
    reasons = equivalents(EQUIVALENT)
    outcomes = [Outcome(m, EQUIVALENT_TO, reasons[key(m)]) for m in found if key(m) in reasons and not options.all]
    chosen = [mutant for mutant in found if options.all or key(mutant) not in reasons]
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    if options.list:
        outcomes += [Outcome(mutant, "") for mutant in chosen]
    else:
        detectors = {name: DETECTORS[name] for name in options.detectors or DETECTORS}
        outcomes += list(run_all(chosen, detectors))
    outcomes.sort(key=lambda outcome: (outcome.mutant.path, outcome.mutant.start))
    Console().print(table(outcomes))
    if options.json:
        rows = [(o.mutant.path, o.mutant.line, o.mutant.deleted, o.verdict, o.detail) for o in outcomes]
        Path(options.json).write_text(json.dumps(rows, indent=1))
    known = {key(mutant) for mutant in found}
    stale = [entry for entry in reasons if not options.paths and entry not in known]
    for entry in stale:
        print(f"equivalent.toml: there is no such mutant any more: {entry}")
    return int(bool(stale) or any(outcome.verdict == SURVIVED for outcome in outcomes))


def all_mutants(kind: str, paths: list[str]) -> Iterator[Mutant]:
    """Yield the mutants of a kind in all of its files, or in those that lie below one of `paths`."""
    module = KINDS[kind]
    for folder in module.FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            is_asked_for = not paths or any(f"{path}/".startswith(f"{asked.rstrip('/')}/") for asked in paths)
            if is_asked_for and not path.startswith(module.WITHOUT):
                mutants = module.mutants(SourceFile(path, file.read_text()))
                yield from sorted(mutants, key=lambda mutant: mutant.start)


def key(mutant: Mutant) -> tuple[str, str, str, int]:
    """Return what identifies a mutant if lines have moved."""
    return mutant.path, mutant.function, mutant.deleted, mutant.number


def equivalents(file: Path) -> dict[tuple[str, str, str, int], str]:
    """Return the reason why a mutant is as right as the code, by `key`."""
    entries = tomllib.loads(file.read_text()).get("equivalent", [])
    return {(e["path"], e["function"], e["deleted"], e.get("number", 0)): e["reason"] for e in entries}


def run_all(mutants: list[Mutant], detectors: dict[str, list[str]]) -> Iterator[Outcome]:
    """Yield what became of each mutant. Ends the program if a detector fails without one."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, _progress() as progress:
        tree = Path(folder)
        copy_tree(tree)
        task = progress.add_task("without a mutant", total=len(mutants))
        limits = {}
        for name, tests in detectors.items():
            start = time.monotonic()
            if failed := run_tests(tree, tests, limit_seconds=1200):
                sys.exit(f"{name} fails on the code itself: {failed}")
            limits[name] = 60 + 3 * (time.monotonic() - start)
        for mutant in mutants:
            progress.update(task, description=f"{mutant.path}:{mutant.line}")
            outcome = judge(tree, mutant, detectors, limits)
            yield outcome
            progress.console.print(f"{mutant.path}:{mutant.line} {outcome.verdict}", markup=False, highlight=False)
            progress.advance(task)


def judge(tree: Path, mutant: Mutant, detectors: dict[str, list[str]], limits: dict[str, float]) -> Outcome:
    """Run the detectors on one mutant, until one fails."""
    file = tree / mutant.path
    source = file.read_text()
    try:
        _replace(file, mutant.apply(source))
        for name, tests in detectors.items():
            if failed := run_tests(tree, tests, limits[name]):
                return Outcome(mutant, name, failed)
        return Outcome(mutant, SURVIVED)
    finally:
        _replace(file, source)


def copy_tree(to: Path) -> None:
    """Copy the files that git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def _replace(file: Path, source: str) -> None:
    file.write_text(source)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()  # Python compares size and seconds only, and a mutant may agree in both


def table(outcomes: list[Outcome]) -> Table:
    """Return a table of what became of each mutant."""
    caught = sum(outcome.verdict in DETECTORS for outcome in outcomes)
    survived = sum(outcome.verdict == SURVIVED for outcome in outcomes)
    rows = Table(title=f"{len(outcomes)} mutants: {caught} caught, {survived} survived")
    for name in ("where", "deleted", "caught by", "how"):
        rows.add_column(name, overflow="fold")
    for outcome in outcomes:
        mutant = outcome.mutant
        rows.add_row(f"{mutant.path}:{mutant.line}", mutant.deleted, outcome.verdict, outcome.detail[:160])
    return rows


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break the code in one place at a time, and see which test fails.")
    parser.add_argument("paths", nargs="*", help="only mutants in these files and folders")
    parser.add_argument("--kind", choices=KINDS, default="waits")
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, help="only these")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of the mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--all", action="store_true", help="run those that are listed as equivalent, too")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes to a file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
