"""Check that a run which loses one of two nodes logs exactly the steps of an undisturbed run.

python -m lab.faults.two_nodes

Each run has 2 data-parallel x 2 tensor-parallel ranks, on two network namespaces in place of nodes
(lab/faults/testbed.py), and is started by scripts/launch/hostfile.sh. The first run is undisturbed. In the second the
processes of a node are killed, in the third its link is taken down; both are then started again and run to their end.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from lab.acceptance.child import as_options
from lab.faults.runs import OPTIONS, Job, Steps, prepare_corpus
from lab.faults.testbed import Node, joined_nodes, ssh_to, testbed_problem

NUM_STEPS, HANG_SECONDS = 40, 8
END_SECONDS = 120  # limit for a job that has lost a node
SETTINGS = OPTIONS | {
    "parallel.tensor_size": 2,
    "zero.stage": 2,
    "train.steps": NUM_STEPS,
    "checkpoint.every": 4,
    "run.hang_seconds": HANG_SECONDS,
}


def start(nodes: list[Node], settings: dict[str, object], run_dir: Path) -> Job:
    """Start a training run by hostfile.sh on all nodes, which share its folder."""
    hosts, stubs = run_dir.with_suffix(".hosts"), run_dir.with_suffix(".bin")
    hosts.write_text("".join(f"{node.address}\n" for node in nodes))
    if not stubs.exists():
        ssh_to(nodes, stubs)
    return Job(
        {"launcher": ["scripts/launch/hostfile.sh", *as_options(settings | {"run.dir": run_dir})]},
        run_dir,
        HOSTS=str(hosts),
        PATH=f"{stubs}:{os.environ['PATH']}",
        PYTHON=sys.executable,
        RANKS_PER_NODE="2",
        PREFLIGHT_SECONDS="60",
        GRACE_SECONDS=str(END_SECONDS // 2),
    )


def lose_and_restart(nodes: list[Node], prefix: Path, folder: Path) -> tuple[Steps, dict[str, tuple[int, Steps]]]:
    """Return the steps of the undisturbed run, and {what was lost: (exit code, all steps after the restart)}."""
    settings = SETTINGS | {"data.path": prefix}
    undisturbed = start(nodes, settings, folder / "undisturbed").run_to_end()
    losses: dict[str, Callable[[], None]] = {
        "processes of n2": nodes[1].kill_processes,
        "link of n2": lambda: nodes[1].set_link(is_up=False),
    }
    found = {}
    for what, lose in losses.items():
        run_dir = folder / what.replace(" ", "-")
        job = start(nodes, settings, run_dir)
        job.wait_for_step(10)
        lose()
        # Only the launcher: ranks of the lost node may be left.
        code = job.processes["launcher"].wait(END_SECONDS)
        for node in nodes:
            node.set_link(is_up=True)
            node.kill_processes()  # as a scheduler does with processes that a job has left
        job.end()
        found[what] = code, start(nodes, settings, run_dir).run_to_end()
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
