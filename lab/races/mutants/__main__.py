"""The self-test of the detectors of races: delete one wait at a time, and see which detector notices it.

    python -m lab.races.mutants                        every wait, about 20 seconds each
    python -m lab.races.mutants zero/homes --list      the waits of a folder or a file; runs nothing
    python -m lab.races.mutants --detectors checker    what one detector notices by itself

Each mutant is made in a copy of the working tree, in a temporary folder. The detectors (waits.yaml) are groups of
tests, which pass on the code itself, and run in order until one fails; a mutant survives if none does. Mutants that are
as right as the code are listed there, each with its reason, and are not run.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lab.races.mutants.waits import DETECTORS, EQUIVALENT, FOLDERS, WITHOUT, Mutant, SourceFile, mutants

ROOT = Path(__file__).resolve().parents[3]
LIMIT_SECONDS = 600.0  # for the tests of a detector: a mutant may hang
SURVIVED = "SURVIVED"
PYTEST = sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short"


def main() -> int:
    parser = argparse.ArgumentParser(description="Delete one wait at a time, and see which detector notices it.")
    parser.add_argument("paths", nargs="*", help="only mutants in these files and folders")
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=[*DETECTORS], help="only these")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    chosen = [mutant for mutant in all_mutants(options.paths) if (mutant.path, mutant.deleted) not in EQUIVALENT]
    if options.list:
        print(*chosen, sep="\n")
        return 0
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_tree(Path(folder))
        detectors = {name: DETECTORS[name] for name in options.detectors}
        for tests in detectors.values():
            if failed := run_tests(Path(folder), tests):
                sys.exit(f"a test fails on the code itself: {failed}")
        for number, mutant in enumerate(chosen, start=1):
            verdict, detail = verdict_on(Path(folder), mutant, detectors)
            verdicts[verdict] += 1
            print(f"{number}/{len(chosen)} {mutant}: {verdict} {detail[:160]}", flush=True)
    print(", ".join(f"{verdict}: {count}" for verdict, count in verdicts.items()))
    return int(verdicts[SURVIVED] > 0)


def all_mutants(paths: list[str]) -> Iterator[Mutant]:
    """Yield the mutants of all files, or of the files below one of `paths`."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            is_asked_for = not paths or any(f"{path}/".startswith(f"{asked.rstrip('/')}/") for asked in paths)
            if is_asked_for and not path.startswith(WITHOUT):
                yield from sorted(mutants(SourceFile(path, file.read_text())), key=lambda mutant: mutant.start)


def verdict_on(tree: Path, mutant: Mutant, detectors: dict[str, list[str]]) -> tuple[str, str]:
    """Run the detectors on a mutant until one fails; return its name and its test, or `SURVIVED`."""
    file = tree / mutant.path
    source = file.read_text()
    try:
        _replace(file, mutant.apply(source))
        failures = ((name, run_tests(tree, tests)) for name, tests in detectors.items())
        return next((found for found in failures if found[1]), (SURVIVED, ""))
    finally:
        _replace(file, source)


def run_tests(tree: Path, tests: list[str]) -> str:
    """Run tests of a tree until one fails; return its name and the last line of its error, "" if nothing failed."""
    command, environment = [*PYTEST, *tests], os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tree, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            lines = process.communicate(timeout=LIMIT_SECONDS)[0].splitlines()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
            return f"no end after {LIMIT_SECONDS:.0f} s"
    if process.returncode == 0:
        return ""
    test = next((line.partition(" ")[2].split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    error = next((line[2:].strip() for line in reversed(lines) if line.startswith("E  ")), "")
    return f"{test or f'exit code {process.returncode}'}: {error}"


def copy_tree(to: Path) -> None:
    """Copy the files that git knows, or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def _replace(file: Path, source: str) -> None:
    file.write_text(source)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()  # Python compares size and seconds only, and a mutant may agree in both


if __name__ == "__main__":
    sys.exit(main())
