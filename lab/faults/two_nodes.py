"""Check that a run which loses one of two nodes logs exactly the steps of an undisturbed run.

python -m lab.faults.two_nodes

Each run has 2 data-parallel x 2 tensor-parallel ranks, on two network namespaces in place of nodes
(lab/faults/testbed.py), and is started by scripts/launch/hostfile.sh. The first run is undisturbed. In the second the
processes of a node are killed, in the third its link is taken down; both are then started again and run to their end.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpt.run_folder.files import read_steps
from lab.acceptance.child import ROOT, as_options
from lab.faults.runs import OPTIONS, Steps, logged_steps, prepare_corpus
from lab.faults.testbed import Node, joined_nodes, ssh_to, testbed_problem

NUM_STEPS, HANG_SECONDS = 40, 8
END_SECONDS = 120.0  # limit for a job that has lost a node
SETTINGS = OPTIONS | {
    "parallel.tensor_size": 2,
    "zero.stage": 2,
    "train.steps": NUM_STEPS,
    "checkpoint.every": 4,
    "run.hang_seconds": HANG_SECONDS,
}


class Job:
    """A training run on all nodes, in a folder that they share."""

    def __init__(self, nodes: list[Node], settings: dict[str, object], run_dir: Path):
        self._run_dir = run_dir
        hosts = run_dir.with_suffix(".hosts")
        hosts.write_text("".join(f"{node.address}\n" for node in nodes))
        stubs = run_dir.with_suffix(".bin")
        ssh = stubs if stubs.exists() else ssh_to(nodes, stubs)
        self._environment = os.environ | {
            "HOSTS": str(hosts),
            "PATH": f"{ssh}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "RANKS_PER_NODE": "2",
            "OMP_NUM_THREADS": "1",
            "PREFLIGHT_SECONDS": "60",
            "GRACE_SECONDS": str(END_SECONDS / 2),
        }
        self._command = ["scripts/launch/hostfile.sh", *as_options(settings | {"run.dir": run_dir})]

    def start(self) -> subprocess.Popen:
        log = self._run_dir.with_suffix(".log").open("a")
        return subprocess.Popen(self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    def run_to_end(self) -> Steps:
        """Run the job and return its logged steps. Raises RuntimeError with the end of its log if it fails."""
        if self.start().wait():
            raise RuntimeError(self._run_dir.with_suffix(".log").read_text()[-6000:])
        return logged_steps(self._run_dir)

    def run_until_node_is_lost(self, lose: Callable[[], None], step: int) -> int:
        """Start the job, call `lose` after `step`, and return the job's exit code.

        Raises TimeoutExpired if the job does not end.
        """
        running = self.start()
        while len(read_steps(self._run_dir)) < step and running.poll() is None:
            time.sleep(0.02)
        lose()
        return running.wait(END_SECONDS)


def lose_and_restart(nodes: list[Node], prefix: Path, folder: Path) -> tuple[Steps, dict[str, tuple[int, Steps]]]:
    """Return the steps of the undisturbed run, and {what was lost: (exit code, all steps after the restart)}."""
    settings = SETTINGS | {"data.path": prefix}
    undisturbed = Job(nodes, settings, folder / "undisturbed").run_to_end()
    losses: dict[str, Callable[[], None]] = {
        "processes of n2": nodes[1].kill_processes,
        "link of n2": lambda: nodes[1].set_link(is_up=False),
    }
    found = {}
    for what, lose in losses.items():
        job = Job(nodes, settings, folder / what.replace(" ", "-"))
        code = job.run_until_node_is_lost(lose, step=10)
        for node in nodes:
            node.set_link(is_up=True)
            node.kill_processes()  # as a scheduler does with processes that a job has left
        found[what] = code, job.run_to_end()
    return undisturbed, found


def main() -> None:
    if reason := testbed_problem():
        sys.exit(f"skipped: {reason}")
    with tempfile.TemporaryDirectory() as name, joined_nodes() as nodes:
        folder = Path(name)
        undisturbed, found = lose_and_restart(nodes, prepare_corpus(folder), folder)
        print(f"undisturbed: {len(undisturbed)} steps, loss {undisturbed[0][1]:.4f} -> {undisturbed[-1][1]:.4f}")
        for what, (code, steps) in found.items():
            verdict = "the same losses" if steps == undisturbed else "OTHER LOSSES"
            print(f"lost the {what}: exit code {code}; started again: {verdict}")
    sys.exit(any(code == 0 or steps != undisturbed for code, steps in found.values()))


if __name__ == "__main__":
    main()
