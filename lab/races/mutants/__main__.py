"""The self-test of the detectors of races: delete one wait at a time, and see which detector notices it.

    python -m lab.races.mutants                        every wait, about 15 seconds each
    python -m lab.races.mutants zero/memory --list     the waits of a folder or a file; runs nothing
    python -m lab.races.mutants --detectors checker    what one detector notices by itself

Each mutant is made in a copy of the working tree, in a temporary folder. The detectors (waits.py) are groups of tests,
which run in order until one fails; a mutant survives if none does. Mutants that are as right as the code are listed in
waits.py, each with its reason, and are not run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.races.mutants.mutant import Mutant, SourceFile
from lab.races.mutants.runner import run_tests
from lab.races.mutants.waits import DETECTORS, EQUIVALENT, FOLDERS, WITHOUT, Key, mutants

ROOT = Path(__file__).resolve().parents[3]
LIMIT_SECONDS = 600.0  # for the tests of a detector: a mutant may hang

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
    found = list(all_mutants(options.paths))
    outcomes = [Outcome(m, EQUIVALENT_TO, EQUIVALENT[key(m)]) for m in found if key(m) in EQUIVALENT]
    chosen = [mutant for mutant in found if key(mutant) not in EQUIVALENT]
    if options.list:
        outcomes += [Outcome(mutant, "") for mutant in chosen]
    else:
        outcomes += run_all(chosen, {name: DETECTORS[name] for name in options.detectors})
    outcomes.sort(key=lambda outcome: (outcome.mutant.path, outcome.mutant.start))
    Console().print(table(outcomes))
    stale = stale_equivalents(EQUIVALENT)
    for entry in stale:
        print(f"waits.py: EQUIVALENT names a mutant that does not exist any more: {entry}")
    return int(bool(stale) or any(outcome.verdict == SURVIVED for outcome in outcomes))


def all_mutants(paths: list[str]) -> Iterator[Mutant]:
    """Yield the mutants of all files, or of the files below one of `paths`."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            is_asked_for = not paths or any(f"{path}/".startswith(f"{asked.rstrip('/')}/") for asked in paths)
            if is_asked_for and not path.startswith(WITHOUT):
                yield from sorted(mutants(SourceFile(path, file.read_text())), key=lambda mutant: mutant.start)


def key(mutant: Mutant) -> Key:
    """Return what identifies a mutant if lines have moved."""
    return mutant.path, mutant.function, mutant.deleted, mutant.number


def stale_equivalents(keys: Iterable[Key]) -> list[Key]:
    """Return the keys that no mutant has any more."""
    known = {key(mutant) for mutant in all_mutants([])}
    return [entry for entry in keys if entry not in known]


def run_all(mutants: list[Mutant], detectors: dict[str, list[str]]) -> Iterator[Outcome]:
    """Yield the outcome of each mutant, and print it."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_tree(Path(folder))
        judge = Judge(Path(folder), detectors)
        for number, mutant in enumerate(mutants, start=1):
            outcome = judge.outcome(mutant)
            where = f"{number}/{len(mutants)} {mutant.path}:{mutant.line}"
            print(f"{where} {mutant.change} {outcome.verdict} {outcome.detail[:160]}", flush=True)
            yield outcome


class Judge:
    """A copy of the working tree in which the detectors run on one mutant after another."""

    def __init__(self, tree: Path, detectors: dict[str, list[str]]):
        self._tree, self._detectors = tree, detectors
        self._right: set[str] = set()  # tests that pass on the code itself

    def outcome(self, mutant: Mutant) -> Outcome:
        """Run the detectors on a mutant, until one fails. Ends the program if it fails on the code itself, too."""
        for name, tests in self._detectors.items():
            if failed := self._run(mutant, tests):
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
    """Return a table of the outcomes."""
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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Delete one wait at a time, and see which detector notices it.")
    parser.add_argument("paths", nargs="*", help="only mutants in these files and folders")
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=[*DETECTORS], help="only these")
    parser.add_argument("--list", action="store_true", help="run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
