"""Compare two commits on one machine: the bits, messages and host operations of small runs, or the times of steps.

    python -m lab.compare_commits BEFORE            # a commit, with the files of this checkout
    python -m lab.compare_commits BEFORE AFTER --only "stage 3" -- --zero.overlap false
    python -m lab.compare_commits BEFORE --times

This Python runs both commits, each case (lab/compare_commits/cases.py) on both sides before the next one. Bits are the
losses, the gradient norms and the validation loss of metrics.jsonl, and the weights that a checkpoint exports; messages
are counted in the whole run, and host operations in one step of it. Settings after `--` are added to all cases. The
exit code is 1 if bits or messages differ, or a commit refuses a case. Nothing is kept: bits depend on the machine.

With --times, steps of a model whose step is nearly all work of the host (24 blocks of width 32, 16 tokens, a thread,
two ranks) are timed in rounds, by the clock and by the processor time of rank 0.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from statistics import median

from safetensors.numpy import load_file

from lab.bench.rounds import in_rounds, quartiles, ratios
from lab.compare_commits.cases import Case, compared, timed
from lab.compare_commits.comparison import Measured, Refused, Row, compare
from lab.pages.markdown import ROOT, table
from parallel.launch.preflight import split_words
from parallel.validation.errors import ConfigError, exit_on_config_error

CHILD = Path(__file__).with_name("child.py")
LIMIT_SECONDS = 900.0  # of a case on one side, which takes seconds on an idle machine
NUM_WARM_UP = 10  # steps that are not timed
VOCAB_SIZE = 512


class Side:
    """A checkout, and a process that runs cases in it."""

    def __init__(self, root: Path, folder: Path, more: Sequence[str]):
        self._folder, self.more = folder, more
        self._log = folder / "log"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        folder.mkdir()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(CHILD)],
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, case: Case) -> Path | Refused:
        """Return the folder of the files of a run, which the next one removes."""
        folder = self._folder / "case"
        rmtree(folder, ignore_errors=True)
        folder.mkdir()
        request = {
            "folder": str(folder),
            "ranks": case.num_ranks,
            "arguments": [*case.options, *self.more],
            "steps": case.num_steps,
            "micro_batches": case.num_micro_batches,
            "counts_operations": case.counts_operations,
            "limit_seconds": LIMIT_SECONDS,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            return Refused(f"its program cannot be imported: {_reason(self._log)}")
        codes = json.loads(answer)
        if None in codes:
            return Refused(f"rank {codes.index(None)} has not ended: {_reason(folder / 'log')}")
        return folder if not any(codes) else Refused(_reason(folder / "log"))

    def measure(self, case: Case) -> Measured | Refused:
        folder = self.run(case)
        if isinstance(folder, Refused):
            return folder
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        ranks = _of_ranks(folder, case)
        weights: dict[str, str] = {}
        for path in (folder / "weights").glob("*.safetensors"):
            weights |= _hashes(path)
        return Measured(steps, weights, [rank["messages"] for rank in ranks], [rank["operations"] for rank in ranks])

    def step_times(self, case: Case) -> tuple[float, float]:
        """Return the median milliseconds of a step, and of the processor time of rank 0 in it."""
        folder = self.run(case)
        if isinstance(folder, Refused):
            raise ConfigError(f"{case.name}: {folder.line}")
        starts = _of_ranks(folder, case)[0]["starts"][NUM_WARM_UP:]
        clock, processor = zip(*([b - a for a, b in zip(*two, strict=True)] for two in pairwise(starts)), strict=True)
        return 1e3 * median(clock), 1e3 * median(processor)

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a request that a process which has ended did not read
            self._process.stdin.close()
        self._process.wait()


def _of_ranks(folder: Path, case: Case) -> list[dict]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(case.num_ranks)]


def _reason(log: Path) -> str:
    """Return the line of an output that says why it ends."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "no output")


def _hashes(path: Path) -> dict[str, str]:
    """Return a hash of the bytes of each tensor in a file of safetensors."""
    return {name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in load_file(path).items()}


@contextmanager
def checkout(commit: str | None, folder: Path) -> Iterator[Path]:
    """Check a commit out to the folder, and remove it at the end; None: this checkout, with its uncommitted changes."""
    if commit is None:
        yield ROOT
        return
    _git("worktree", "add", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*words: str) -> None:
    ended = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ConfigError(f"git {' '.join(words)}: {ended.stderr.strip().splitlines()[-1]}")


def prepare_text(folder: Path, tree: Path) -> Path:
    """Prepare a text by the program in `tree`, the older one, which the other one reads too; return its PREFIX."""
    prefix, source = folder / "text", folder / "text.jsonl"
    paragraphs = [part for path in sorted((ROOT / "docs").glob("*.md")) for part in path.read_text().split("\n\n")]
    source.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    words = [f"--source={source}", f"--output={prefix}", f"--train_vocab_size={VOCAB_SIZE}", "--workers=1"]
    subprocess.run([sys.executable, "-m", "data.prepare", *words], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return prefix


@contextmanager
def both_sides(before: str, after: str | None, more: Sequence[str]) -> Iterator[tuple[Side, Side]]:
    """Start both sides, in a temporary folder that is removed at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with checkout(before, folder / "BEFORE") as old, checkout(after, folder / "AFTER") as new:
            words = [f"--data.path={prepare_text(folder, old)}", *more]
            sides = Side(old, folder / "runs-before", words), Side(new, folder / "runs-after", words)
            try:
                yield sides
            finally:
                for side in sides:
                    side.close()


def compare_cases(before: Side, after: Side, cases: Sequence[Case]) -> list[Row]:
    rows = []
    for case in cases:
        rows.append(compare(case.name, before.measure(case), after.measure(case)))
        print(f"{len(rows)}/{len(cases)} {' | '.join(rows[-1].cells())}", file=sys.stderr)
    return rows


def times_table(before: Side, after: Side, num_rounds: int) -> list[str]:
    """Time both sides in rounds; return a table of the medians of a round, with quartiles over the rounds."""
    lines = []
    for case in timed():
        sides = {"before": partial(before.step_times, case), "after": partial(after.step_times, case)}
        found = in_rounds(sides, num_rounds)
        for number, what in enumerate(("step", "processor")):
            of_before, of_after = ([times[number] for times in found[one]] for one in sides)
            numbers = quartiles(of_before), quartiles(of_after), quartiles(ratios(of_after, of_before))
            forms = ".2f", ".2f", ".3f"
            lines.append([case.name, what, *(format(one, form) for one, form in zip(numbers, forms, strict=True))])
    return table(("", "ms", "BEFORE", "AFTER", "AFTER / BEFORE"), lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.compare_commits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", help="a commit; default: this checkout, with its uncommitted changes")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a part of the names of the cases that are run")
    parser.add_argument("--times", action="store_true", help="compare times of steps instead")
    parser.add_argument("--rounds", type=int, default=5, help="of --times")
    own, more = split_words(words)
    options = parser.parse_args(own)
    cases = compared(options.only)
    if not cases:
        raise ConfigError(f"--only={options.only} is in no name; choose of {', '.join(one.name for one in compared())}")
    if options.rounds < 2:
        raise ConfigError(f"--rounds={options.rounds} has no quartiles; choose 2 or more")
    with both_sides(options.before, options.after, more) as (before, after):
        if options.times:
            print(*times_table(before, after, options.rounds), sep="\n")
            return 0
        rows = compare_cases(before, after, cases)
    headings = "case", "bits", "messages", "host operations of a step"
    print(*table(headings, (row.cells() for row in rows)), sep="\n")
    return int(not all(row.is_equal for row in rows))


if __name__ == "__main__":
    with exit_on_config_error(OSError):
        sys.exit(main(sys.argv[1:]))
