"""Small runs of the program, with and without faults, and what their ranks have said."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data import prepare
from lab.acceptance.child import ROOT, as_options, descendants, kill_all
from lab.faults.failing_run import Fault

OPTIONS: dict[str, object] = {"config": Path(__file__).with_name("run.yaml")}
Steps = list[tuple]  # (step, loss, gradient norm) of each
LIMIT_SECONDS = 240.0  # for one start of a job, which takes 10 on a machine with two idle cores
# The last line of a traceback that a rank prints because another one has ended.
BROKEN_CONNECTION = re.compile(
    r"closed by peer|Connection reset|Broken pipe|Connection refused|gloo/transport|\bstore\b"
)


@dataclass(frozen=True)
class Ended:
    """A job that has ended: its exit code, or None if it was killed because it hung, and its output."""

    code: int | None
    said: str

    @property
    def tracebacks(self) -> list[str]:
        """The last lines of the tracebacks that the ranks have printed, but those of the launcher."""
        blocks = re.split(r"^.*Traceback \(most recent call last\):$", self.said, flags=re.MULTILINE)[1:]
        lasts = []
        for block in blocks:
            lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in block.splitlines()[1:]]
            last = next((line for line in lines if line and not line.startswith(" ")), "")
            if "ChildFailedError" not in last:
                lasts.append(last)
        return lasts

    @property
    def unexpected_tracebacks(self) -> list[str]:
        """The last lines of tracebacks other than those of a connection to a rank that has ended."""
        return [line for line in self.tracebacks if not BROKEN_CONNECTION.search(line)]

    @property
    def has_aborted(self) -> bool:
        """True if a rank ended by a signal that a bug sends."""
        names = "SIGABRT|SIGSEGV|SIGBUS|SIGFPE|Signal 6 |Signal 11 |Fatal Python error|core dumped"
        return bool(re.search(names, self.said)) or self.code in (134, 139)

    @property
    def errors(self) -> list[str]:
        return [line for line in self.said.splitlines() if line.startswith("error: ")]


def start(
    arguments: dict[str, object],
    run_dir: Path,
    faults: Sequence[Fault] = (),
    *,
    num_ranks: int = 2,
    num_restarts: int = 0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a job, which its launcher restarts after a failure up to `num_restarts` times."""
    command = [sys.executable, "-m", "parallel.launch", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [f"--max-restarts={num_restarts}", "--shutdown-timeout=5", "-m", "lab.faults.failing_run"]
    command += [word for fault in faults for word in ("--fault", str(fault))]
    command += ["--", *as_options(arguments | {"run.dir": run_dir})]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def end(job: subprocess.Popen[str], limit_seconds: float = LIMIT_SECONDS) -> Ended:
    """Wait for a job. If it does not end in time, kill all of its processes."""
    try:
        said, _ = job.communicate(timeout=limit_seconds)
        return Ended(job.returncode, said)
    except subprocess.TimeoutExpired:
        kill_all([*descendants(job.pid), job.pid])
        return Ended(None, job.communicate()[0])


def logged_steps(run_dir: Path) -> Steps:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"], record["grad_norm"]) for record in map(json.loads, lines)]


def run_under(arguments: dict[str, object], run_dir: Path, faults: Sequence[Fault], num_ranks: int = 2) -> Steps:
    """Return the steps of a run that the launcher restarts after each of `faults`. Raises RuntimeError if it fails."""
    ended = end(start(arguments, run_dir, faults, num_ranks=num_ranks, num_restarts=len(faults)))
    if ended.code:
        raise RuntimeError(f"{' '.join(map(str, faults))}: exit code {ended.code}\n{ended.said[-4000:]}")
    return logged_steps(run_dir)


def prepare_corpus(folder: Path) -> Path:
    """Prepare a corpus of a few thousand tokens and return its PREFIX."""
    text = folder / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number}.txt").write_text(f"{number} green bottles hanging on the wall; " * (3 + number % 7))
    prefix = folder / "corpus"
    prepare.main(as_options({"source": text, "output": prefix, "train_vocab_size": 300, "workers": 1}))
    return prefix
