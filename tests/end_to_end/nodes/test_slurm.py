"""Jobs on a real Slurm of three nodes, which are namespaces of this machine (scripts/slurm_test)."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.acceptance.child import ROOT, as_options
from lab.faults.runs import OPTIONS, logged_steps, prepare_corpus
from tests.programs import wait_until

pytestmark = pytest.mark.full

CLUSTER = ROOT / "scripts" / "slurm_test" / "cluster.sh"
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged", "ip", "nsenter")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}


@dataclass(frozen=True)
class Slurm:
    folder: Path
    settings: dict[str, object]

    def call(self, *words: str, **variables: str) -> str:
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "RANKS_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
        own |= {"PYTHON": sys.executable} | variables
        done = subprocess.run(words, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, check=True)
        return done.stdout

    def submit(self, name: str, *options: str, steps: int = 100_000, **variables: str) -> "Job":
        run_dir = self.folder / name
        settings = as_options(self.settings | {"run.dir": run_dir, "train.steps": steps})
        log = self.folder / f"{name}.log"
        own = ["--parsable", "--nodes=2", "--gpus-per-node=0", f"--output={log}", *options]
        number = self.call("sbatch", *own, "scripts/launch/slurm.sbatch", *settings, **variables)
        return Job(self, number.strip(), run_dir, log)


@dataclass(frozen=True)
class Job:
    slurm: Slurm
    number: str
    run_dir: Path
    log: Path

    def shown(self, name: str) -> str:
        """Return what Slurm shows of the job, such as its JobState."""
        found = re.search(rf"\b{name}=(\S+)", self.slurm.call("scontrol", "show", "job", self.number))
        return found[1] if found else ""

    def wait_for(self, said: str) -> None:
        wait_until(lambda: self.log.exists() and said in self.log.read_text())

    def wait_for_steps(self) -> None:
        wait_until(lambda: (self.run_dir / "metrics.jsonl").exists() and len(logged_steps(self.run_dir)) > 2)

    def end(self) -> str:
        """Wait for the end, and return the exit code as CODE:SIGNAL."""
        wait_until(lambda: self.shown("JobState") in ENDED)
        return self.shown("ExitCode")

    def cancel(self) -> None:
        self.slurm.call("scancel", self.number)
        self.end()


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing or os.getuid():
        pytest.skip(f"needs root, and programs that are missing: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name, "cluster")
        made = subprocess.run([CLUSTER, "up", folder], capture_output=True, text=True, check=False)
        try:
            if made.returncode:
                pytest.skip(f"no Slurm here: {made.stderr.strip()}")
            (folder / "text").mkdir()
            yield Slurm(folder, OPTIONS | {"data.path": prepare_corpus(folder / "text"), "checkpoint.every": 5})
        finally:
            subprocess.run([CLUSTER, "down", folder], capture_output=True, check=False)


def test_a_job_of_two_nodes_runs_to_its_end(slurm):
    job = slurm.submit("whole", steps=6)
    assert job.end() == "0:0"
    assert [step for step, *_ in logged_steps(job.run_dir)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("variables", [{}, {"MIN_NODES": "1"}, {"LAUNCH": "srun"}], ids=str)
def test_a_warning_lets_the_ranks_save_and_queues_the_job_again(slurm, variables):
    job = slurm.submit(f"warned-{len(variables)}-{''.join(variables)}", **variables)
    job.wait_for_steps()
    slurm.call("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(f"scontrol requeue {job.number}")
    job.wait_for("resumed from")
    assert job.shown("Restarts") == "1"
    job.cancel()


def test_a_warning_before_the_ranks_are_up_is_kept(slurm):
    """It ended the job as FAILED before, with the code of a process that it had killed."""
    job = slurm.submit("early")
    job.wait_for("+ srun")
    slurm.call("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(f"scontrol requeue {job.number}")
    wait_until(lambda: job.shown("Restarts") == "1")
    assert "after step 0" in job.log.read_text()
    job.cancel()


def test_a_run_that_a_signal_by_hand_has_stopped_is_not_complete(slurm):
    job = slurm.submit("stopped")
    job.wait_for_steps()
    slurm.call("scancel", "--signal=USR1", job.number)
    assert (job.end(), job.shown("Restarts")) == ("3:0", "0")


def test_the_code_of_the_job_is_that_of_the_ranks(slurm):
    assert slurm.submit("wrong", "--comment=wrong", steps=-1).end() == "2:0"


def test_a_job_that_loses_its_first_node_is_queued_again_by_the_others(slurm):
    """It stayed RUNNING without a process before."""
    job = slurm.submit("first", "--no-kill", MIN_NODES="1")
    job.wait_for_steps()
    subprocess.run([CLUSTER, "kill", slurm.folder, job.shown("BatchHost")[-1]], check=True)
    wait_until(lambda: job.shown("Restarts") == "1")
    job.wait_for("resumed from")
    job.cancel()
