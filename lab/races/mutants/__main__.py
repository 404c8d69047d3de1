"""Prove that the tests notice what they are for: break the code in one place at a time, and see which test fails.

    python -m lab.races.mutants                                    all mutants without a wait, about 15 seconds each
    python -m lab.races.mutants zero/offload --list                what would be broken below a folder, or in a file
    python -m lab.races.mutants --kind edits --sample 20 --seed 3  20 of the small edits of operators, constants, ...

Each mutant is made in a copy of the working tree, in a temporary folder. Its kind chooses groups of tests that may
notice it, its *detectors*, which run in order until one fails. It survives if none does. Survivors that change nothing
are listed in `equivalent.toml`, each with its reason, and are not run. The last detector of an edit is
the whole default suite: `--detectors near folder package` leaves it out.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lab.races.mutants import edits, waits
from lab.races.mutants.mutant import Mutant, SourceFile
from lab.races.mutants.runner import run_tests

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600.0  # for the tests of a detector: a mutant may hang
EQUIVALENT = Path(__file__).with_name("equivalent.toml")

# Kinds of mutants: a module with FOLDERS, WITHOUT, `mutants(file)` and `detectors(mutant)`.
KINDS: dict[str, ModuleType] = {"waits": waits, "edits": edits}

SURVIVED, EQUIVALENT_TO = "SURVIVED", "equivalent"
Key = tuple[str, str, str, int]  # path, function, deleted text, number
Detectors = Callable[[Mutant], dict[str, list[str]]]


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
        outcomes += run_all(chosen, KINDS[options.kind].detectors, options.detectors)
    outcomes.sort(key=lambda outcome: (outcome.mutant.path, outcome.mutant.start))
    Console().print(table(outcomes))
    if options.json:
        rows = [(o.mutant.path, o.mutant.line, o.mutant.change, o.verdict, o.detail) for o in outcomes]
        Path(options.json).write_text(json.dumps(rows, indent=1))
    stale = stale_equivalents(reasons)
    for entry in stale:
        print(f"equivalent.toml: there is no such mutant any more: {entry}")
    return int(bool(stale) or any(outcome.verdict == SURVIVED for outcome in outcomes))


def all_mutants(kind: str, paths: list[str]) -> Iterator[Mutant]:
    """Yield the mutants of a kind in all of its files, or in those that lie below one of `paths`."""
    module = KINDS[kind]
    for folder in module.FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")) or [ROOT / folder]:
            path = file.relative_to(ROOT).as_posix()
            is_asked_for = not paths or any(f"{path}/".startswith(f"{asked.rstrip('/')}/") for asked in paths)
            if is_asked_for and not path.startswith(module.WITHOUT):
                mutants = module.mutants(SourceFile(path, file.read_text()))
                yield from sorted(mutants, key=lambda mutant: mutant.start)


def key(mutant: Mutant) -> Key:
    """Return what identifies a mutant if lines have moved."""
    return mutant.path, mutant.function, mutant.deleted, mutant.number


def equivalents(file: Path) -> dict[Key, str]:
    """Return the reason why a mutant is as right as the code, by `key`."""
    entries = tomllib.loads(file.read_text()).get("equivalent", [])
    return {(e["path"], e["function"], e["deleted"], e.get("number", 0)): e["reason"] for e in entries}


def stale_equivalents(reasons: Iterable[Key]) -> list[Key]:
    """Return the keys that no mutant of any kind has any more."""
    paths = [path for path, *_ in reasons]
    known = {key(mutant) for kind in KINDS for mutant in all_mutants(kind, paths)}
    return [entry for entry in reasons if entry not in known]


def run_all(mutants: list[Mutant], detectors: Detectors, names: list[str] | None) -> Iterator[Outcome]:
    """Yield what became of each mutant; `names` are those of the detectors to run (None: all)."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, _progress() as progress:
        copy_tree(Path(folder))
        judge = Judge(Path(folder))
        task = progress.add_task("", total=len(mutants))
        for mutant, groups in [(mutant, detectors(mutant)) for mutant in mutants]:  # all before the tree may change
            progress.update(task, description=f"{mutant.path}:{mutant.line}")
            outcome = judge.outcome(mutant, {name: groups[name] for name in groups if name in (names or groups)})
            yield outcome
            line = f"{mutant.path}:{mutant.line} {mutant.change} {outcome.verdict} {outcome.detail[:160]}"
            progress.console.print(line, markup=False, highlight=False)
            progress.advance(task)


class Judge:
    """A copy of the working tree in which tests run on one mutant after another."""

    def __init__(self, tree: Path):
        self._tree = tree
        self._right: set[str] = set()  # tests that pass on the code itself

    def outcome(self, mutant: Mutant, detectors: dict[str, list[str]]) -> Outcome:
        """Run the detectors on a mutant, until one fails. Ends the program if it fails on the code itself, too."""
        for name, tests in detectors.items():
            if tests and (failed := self._run(mutant, tests)):
                self._confirm(failed, tests)
                return Outcome(mutant, name, failed)
        return Outcome(mutant, SURVIVED)

    def _run(self, mutant: Mutant, tests: list[str]) -> str:
        file = self._tree / mutant.path
        source = file.read_text()
        try:
            _replace(file, mutant.apply(source))
            return run_tests(self._tree, tests, LIMIT_SECONDS)
        finally:
            _replace(file, source)

    def _confirm(self, failed: str, tests: list[str]) -> None:
        """Run the file of a test that has failed on the code itself, once. All files, if a failure names none."""
        file = failed.partition("::")[0]
        unknown = {file} - self._right if file.endswith(".py") else set(tests) - self._right
        if unknown and (of_itself := run_tests(self._tree, sorted(unknown), LIMIT_SECONDS)):
            sys.exit(f"{', '.join(unknown)} fails on the code itself: {of_itself}")
        self._right |= unknown


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
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    survived = verdicts[SURVIVED]
    caught = verdicts.total() - survived - verdicts[EQUIVALENT_TO] - verdicts[""]
    rows = Table(title=f"{len(outcomes)} mutants: {caught} caught, {survived} survived")
    for name in ("where", "change", "caught by", "how"):
        rows.add_column(name, overflow="fold")
    for outcome in outcomes:
        mutant = outcome.mutant
        rows.add_row(f"{mutant.path}:{mutant.line}", mutant.change, outcome.verdict, outcome.detail[:160])
    return rows


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break the code in one place at a time, and see which test fails.")
    parser.add_argument("paths", nargs="*", help="only mutants in these files and folders")
    parser.add_argument("--kind", choices=KINDS, default="waits")
    parser.add_argument("--detectors", nargs="+", metavar="NAME", help="only these groups of tests")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of the mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--all", action="store_true", help="run those that are listed as equivalent, too")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes to a file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
