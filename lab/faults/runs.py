"""Small runs of the program, with and without faults, and what their ranks have said."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data import prepare
from gpt.run_folder.files import read_steps
from lab.acceptance.child import ROOT, as_options, descendants, kill_all
from lab.faults.failing_run import Fault

OPTIONS: dict[str, object] = {"config": Path(__file__).with_name("run.yaml")}
Steps = list[tuple]  # (step, loss, gradient norm) of each
# Limits for one start of a job, which takes 10 s on a machine with two idle cores, and for a run that is not disturbed.
LIMIT_SECONDS, RUN_SECONDS = 240.0, 600.0
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


class Job:
    """The processes of a run, by name: one launcher, or one on each node. What they say is added to one log."""

    def __init__(self, commands: Mapping[str, Sequence[str]], run_dir: Path, **environment: str):
        self.run_dir, self._log = run_dir, run_dir.with_suffix(".log")
        with self._log.open("ab") as log:
            self._begin = log.tell()
            # A process of its own writes the log: the files that a rank writes may be limited by a fault.
            self._writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
        pipe = self._writer.stdin
        assert pipe is not None
        self.processes = {
            name: subprocess.Popen(
                command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, stdout=pipe, stderr=pipe
            )
            for name, command in commands.items()
        }
        pipe.close()

    @property
    def said(self) -> str:
        """The output of the processes since this start of the run."""
        return self._log.read_bytes()[self._begin :].decode(errors="replace")

    def wait_for_step(self, step: int) -> None:
        """Return when a step is logged. Raises RuntimeError, with what was said, if all processes have ended before."""
        while len(read_steps(self.run_dir)) < step:
            if all(one.poll() is not None for one in self.processes.values()):
                raise RuntimeError(f"the run has ended before step {step}:\n{self.said[-6000:]}")
            time.sleep(0.005)

    def end(self, limit_seconds: float = LIMIT_SECONDS, but: Collection[str] = ()) -> Ended:
        """Wait for all processes, of which the codes of some do not count. Kill all if one does not end in time."""
        deadline = time.monotonic() + limit_seconds
        try:
            codes = {name: one.wait(deadline - time.monotonic()) for name, one in self.processes.items()}
            self._writer.wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            for one in self.processes.values():
                kill_all([*descendants(one.pid), one.pid])
                one.wait()
            self._writer.wait()
            return Ended(None, self.said)
        return Ended(next((code for name, code in codes.items() if code and name not in but), 0), self.said)

    def run_to_end(self, but: Collection[str] = ()) -> Steps:
        """Return the logged steps. Raises RuntimeError with the end of the log if a process fails or does not end."""
        ended = self.end(RUN_SECONDS, but)
        if ended.code != 0:
            raise RuntimeError(f"exit code {ended.code}\n{ended.said[-6000:]}")
        return logged_steps(self.run_dir)


def start(
    arguments: dict[str, object],
    run_dir: Path,
    faults: Sequence[Fault] = (),
    *,
    num_ranks: int = 2,
    num_restarts: int = 0,
    **environment: str,
) -> Job:
    """Start a job, which its launcher restarts after a failure up to `num_restarts` times."""
    command = [sys.executable, "-m", "parallel.launch", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [f"--max-restarts={num_restarts}", "--shutdown-timeout=5", "-m", "lab.faults.failing_run"]
    command += [word for fault in faults for word in ("--fault", str(fault))]
    return Job({"launcher": [*command, "--", *as_options(arguments | {"run.dir": run_dir})]}, run_dir, **environment)


def logged_steps(run_dir: Path) -> Steps:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"], record["grad_norm"]) for record in map(json.loads, lines)]


def prepare_corpus(folder: Path) -> Path:
    """Prepare a corpus of a few thousand tokens and return its PREFIX."""
    text = folder / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number}.txt").write_text(f"{number} green bottles hanging on the wall; " * (3 + number % 7))
    prefix = folder / "corpus"
    prepare.main(as_options({"source": text, "output": prefix, "train_vocab_size": 300, "workers": 1}))
    return prefix
