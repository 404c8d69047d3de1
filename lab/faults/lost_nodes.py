"""Check that a run which loses nodes goes on without them, from the snapshots in the memory of those that are left.

    python -m lab.faults.lost_nodes --rounds 6             on two and three nodes; every third round loses the first
    python -m lab.faults.lost_nodes --rounds 6 --lose 2    two neighbours of three: goes on from the newest checkpoint

The nodes are network namespaces of two ranks (lab/faults/testbed.py), each with a /dev/shm of its own. All processes of
a node are killed at a random moment, and its memory is gone with them. Exits with 1 if a run did not go on, repeated
too many steps, or logged other losses than the undisturbed run.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gpt.run_folder.files import read_steps
from lab.acceptance.child import ROOT, as_options
from lab.faults.runs import OPTIONS, Steps, logged_steps, prepare_corpus
from lab.faults.testbed import Node, joined_nodes, testbed_problem

NUM_RANKS, SNAPSHOT_EVERY, CHECKPOINT_EVERY = 2, 3, 10
LIMIT_SECONDS = 300.0
SETTINGS = OPTIONS | {
    "train.reproducible": "layout",
    "train.steps": 60,
    "train.global_batch_size": 24,
    "train.reproducible_blocks": 4,  # for the 4 and 2 ranks of stage 1
    "zero.accumulate": "reduce",
    "checkpoint.snapshot_every": SNAPSHOT_EVERY,
}


@dataclass(frozen=True)
class Loss:
    """The loss of nodes: what the run went on from, the steps that it repeated, seconds from death to the next step."""

    lost: str
    source: str
    num_repeated: int
    seconds: float
    steps: Steps


class Launch:
    """An elastic launch of a run on nodes."""

    def __init__(self, nodes: list[Node], settings: dict[str, object], run_dir: Path):
        self.nodes, self.run_dir = nodes, run_dir
        self._log = run_dir.with_suffix(".log")
        names = ",".join(node.address for node in nodes)
        own = ["--nodes", names, f"--num_ranks={NUM_RANKS}", "--wait=60", "--"]
        program = ["pretrain_gpt.py", *as_options(settings | {"run.dir": run_dir})]
        self._words = [sys.executable, "-m", "gpt.elastic", *own, *program]
        self._agents = {node.name: self._agent(node) for node in nodes}

    def _agent(self, node: Node) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "e0"}
        command = node.command(self._words, "mount -t tmpfs tmpfs /dev/shm")
        with self._log.open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def wait_for_step(self, step: int) -> None:
        """Return when a step is logged. Raises RuntimeError if the agents end before that."""
        while len(read_steps(self.run_dir)) < step:
            if all(agent.poll() is not None for agent in self._agents.values()):
                raise RuntimeError(self.said[-6000:])
            time.sleep(0.005)

    def end(self, lost: tuple[str, ...] = ()) -> Steps:
        """Wait for the agents of the nodes that are not lost, and return the steps.

        Raises RuntimeError if one fails.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        for name, agent in self._agents.items():
            try:
                if agent.wait(max(1.0, deadline - time.monotonic())) and name not in lost:
                    raise RuntimeError(f"{name}: exit code {agent.returncode}\n{self.said[-6000:]}")
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{name} has not ended\n{self.said[-6000:]}") from None
        return logged_steps(self.run_dir)

    @property
    def said(self) -> str:
        """The output of agents and ranks, without the traces of torch."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not re.match(r"frame #|<omitting|Exception raised|.*\[W|$", line))

    def lose(self, lost: list[Node], step: int) -> Loss:
        """Kill the processes of nodes after a step, wait for the end, and return what it has cost."""
        self.wait_for_step(step)
        for node in lost:
            node.kill_processes()
        died, num_done = time.time(), len(read_steps(self.run_dir))
        names = tuple(node.name for node in lost)
        steps = self.end(names)
        records = map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
        next_time = min(record["unix_time"] for record in records if record["unix_time"] > died + 1.0)
        source, resumed = re.findall(r"resumed from (\S+), after step (\d+)", self.said)[-1]
        kind = "snapshot" if source.startswith("/dev/shm") else "checkpoint"
        return Loss(" and ".join(names), kind, num_done - int(resumed), next_time - died, steps)


def lose_nodes(number: int, num_lost: int, corpus: Path, folder: Path) -> tuple[Loss, str]:
    """Return what a round has lost, and why that is wrong; "" if it is not."""
    this = random.Random(number)
    num_nodes = 3 if num_lost > 1 else 2 + number % 2
    # Stage 1 has blocks of micro-batches for each rank, and 4 blocks cannot be divided over 6 ranks.
    stage = this.choice([1, 2, 3] if num_nodes == 2 else [2, 3])
    # What is newer is loaded: without checkpoints it is a snapshot.
    every = 1000 if num_lost == 1 else CHECKPOINT_EVERY
    settings = SETTINGS | {"data.path": corpus, "zero.stage": stage, "checkpoint.every": every}
    with joined_nodes(num_nodes) as nodes:
        first = 0 if number % 3 == 0 else this.randrange(num_nodes)
        lost = [nodes[(first + offset) % num_nodes] for offset in range(num_lost)]
        # Two lost neighbours need a checkpoint.
        step = this.randrange(4 if num_lost == 1 else 2 + CHECKPOINT_EVERY, 40)
        found = Launch(nodes, settings, folder / f"round-{number}").lose(lost, step)
    # A snapshot is complete some steps after it has begun, but before the next one begins.
    expected, most = ("snapshot", 2 * SNAPSHOT_EVERY) if num_lost == 1 else ("checkpoint", 2 * CHECKPOINT_EVERY)
    wrong = []
    if found.source != expected:
        wrong.append(f"went on from a {found.source}")
    if found.num_repeated > most:
        wrong.append(f"repeated {found.num_repeated} steps")
    return found, ", ".join(wrong)


def undisturbed_steps(corpus: Path, folder: Path) -> Steps:
    """Return the steps of a run that loses nothing, on two nodes."""
    with joined_nodes() as nodes:
        return Launch(nodes, SETTINGS | {"data.path": corpus}, folder / "undisturbed").end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--lose", type=int, default=1, choices=(1, 2), help="nodes lost at once")
    options = parser.parse_args()
    if reason := testbed_problem():
        sys.exit(f"skipped: {reason}")
    num_wrong, seconds = 0, []
    with tempfile.TemporaryDirectory(prefix="lost-") as name:
        folder = Path(name)
        corpus = prepare_corpus(folder)
        undisturbed = undisturbed_steps(corpus, folder)
        for number in range(options.first, options.first + options.rounds):
            try:
                found, wrong = lose_nodes(number, options.lose, corpus, folder)
            except RuntimeError as error:
                print(f"{number:>3} WRONG: {error}", flush=True)
                num_wrong += 1
                continue
            wrong = wrong or ("" if found.steps == undisturbed else "OTHER LOSSES")
            num_wrong += bool(wrong)
            seconds.append(found.seconds)
            repeated = f"{found.num_repeated} steps again, next step after {found.seconds:.1f} s"
            print(f"{number:>3} {wrong or 'right'}: lost {found.lost}, {found.source}, {repeated}", flush=True)
    if seconds:
        print(f"{num_wrong} of {options.rounds} wrong; median of {median(seconds):.1f} s from death to the next step")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
