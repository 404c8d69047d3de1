"""Check that a run which loses nodes goes on without them, from the snapshots in the memory of those that are left.

    python -m lab.faults.lost_nodes --rounds 6             on two and three nodes; every third round loses the first
    python -m lab.faults.lost_nodes --rounds 6 --lose 2    two neighbours of three: goes on from the newest checkpoint
    python -m lab.faults.lost_nodes --rounds 6 --lose 0    no node, but all ranks, and snapshots are damaged
    python -m lab.faults.lost_nodes --beside_checkpoints   each round again without snapshots, with checkpoints as often
    python -m lab.faults.lost_nodes --by link              the node's link goes down, and its processes go on

The nodes are network namespaces of two ranks (lab/faults/testbed.py), each with a /dev/shm of its own. All processes of
a node are killed at a random moment, and its memory is gone with them. Exits with 1 if a run did not go on, repeated
too many steps, or logged other losses than the undisturbed run.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from gpt.checkpoint.folder import checkpoints
from gpt.run_folder.files import CHECKPOINTS, read_steps
from lab.acceptance.child import ROOT, as_options
from lab.faults.damage import DAMAGES
from lab.faults.runs import OPTIONS, Steps, logged_steps, prepare_corpus
from lab.faults.testbed import Node, joined_nodes, testbed_problem
from zero.state.saved_state import rank_file

NUM_RANKS, SAVE_EVERY, SELDOM = 2, 3, 7
NEVER = 1000
LIMIT_SECONDS = 300.0
SETTINGS = OPTIONS | {
    "train.reproducible": "layout",
    "train.steps": 24,
    "train.global_batch_size": 24,
    "train.reproducible_blocks": 4,  # for the 4 and 2 ranks of stage 1
    "zero.accumulate": "reduce",
    "checkpoint.snapshot_every": SAVE_EVERY,
}


@dataclass(frozen=True)
class Loss:
    """The loss of nodes: what the run went on from, the steps that it repeated, seconds from death to the next step."""

    lost: str
    source: str
    num_repeated: int
    seconds: float
    steps: Steps


By = Literal["kill", "link"]
Source = Literal["snapshot", "checkpoint"]  # what a run goes on from


class Launch:
    """An elastic launch of a run on nodes."""

    def __init__(self, nodes: list[Node], settings: dict[str, object], run_dir: Path, min_nodes: int = 1):
        self.nodes, self.run_dir = nodes, run_dir
        self._log = run_dir.with_suffix(".log")
        names = ",".join(node.address for node in nodes)
        own = ["--nodes", names, f"--num_ranks={NUM_RANKS}", f"--min_nodes={min_nodes}", "--wait=60", "--"]
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

    def lose(self, lost: list[Node], step: int, by: By = "kill") -> Loss:
        """Lose nodes after a step, wait for the end, and return what it has cost."""
        self.wait_for_step(step)
        for node in lost:
            if by == "kill":
                node.kill_processes()
            else:
                node.set_link(is_up=False)
        return self._end_after(lost)

    def damage_snapshots(self, step: int, chance: random.Random) -> tuple[Loss, Source]:
        """Kill all ranks after a step and damage a rank's file in the newest snapshot, or in all, on each node.

        Return what it has cost, and from what the run has to go on.
        """
        self.wait_for_step(step)
        while any(len(checkpoints(self._memory_of(node))) < 2 for node in self.nodes):
            time.sleep(0.005)  # until two are complete, before the older one is deleted
        for agent in self._agents.values():
            agent.send_signal(signal.SIGSTOP)  # it starts the ranks again only when the files are damaged
        for node in self.nodes:
            node.kill_processes(but=self._agents[node.name].pid)
        found = [checkpoints(self._memory_of(node)) for node in self.nodes]
        every = sorted({step for on_node in found for step in on_node})
        damaged = every if chance.random() < 0.5 else every[-1:]
        file = rank_file(Path(), chance.randrange(NUM_RANKS * len(self.nodes)))
        for on_node in found:
            for path in (on_node[step] / file for step in damaged if step in on_node):
                if path.exists():
                    chance.choice([*DAMAGES.values()])(path)
        whole = set.intersection(*map(set, found)).difference(damaged)
        newest = max(checkpoints(self.run_dir / CHECKPOINTS), default=0)
        for agent in self._agents.values():
            agent.send_signal(signal.SIGCONT)
        return self._end_after([]), "snapshot" if max(whole, default=0) > newest else "checkpoint"

    def _memory_of(self, node: Node) -> Path:
        """Return the folder of a node's snapshots, as this process sees it."""
        (folder,) = Path(f"/proc/{self._agents[node.name].pid}/root/dev/shm/zero-gpt").iterdir()
        return folder

    def _end_after(self, lost: list[Node]) -> Loss:
        died, num_done = time.time(), len(read_steps(self.run_dir))
        names = tuple(node.name for node in lost)
        steps = self.end(names)
        records = map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
        next_time = min(record["unix_time"] for record in records if record["unix_time"] > died + 1.0)
        source, resumed = re.findall(r"resumed from (\S+), after step (\d+)", self.said)[-1]
        kind = "snapshot" if source.startswith("/dev/shm") else "checkpoint"
        return Loss(" and ".join(names), kind, num_done - int(resumed), next_time - died, steps)


def lose_nodes(
    number: int, num_lost: int, corpus: Path, folder: Path, source: Source = "snapshot", by: By = "kill"
) -> tuple[Loss, str]:
    """Return what a round has lost, and why that is wrong; "" if it is not.

    Of two neighbors no snapshot is left. If no node is lost, snapshots are damaged.
    """
    this = random.Random(number)
    num_nodes = 3 if num_lost > 1 or by == "link" else 2 + number % 2
    # Stage 1 has blocks of micro-batches for each rank, and 4 blocks cannot be divided over 6 ranks.
    stage = this.choice([1, 2, 3] if num_nodes == 2 else [2, 3])
    settings = SETTINGS | {"data.path": corpus, "zero.stage": stage}
    # What is newer is loaded: without checkpoints it is a snapshot.
    if num_lost != 1:
        source, every = "checkpoint", SELDOM
        settings["checkpoint.every"] = SELDOM
        if num_lost == 0:
            settings["checkpoint.snapshot_every"] = 2  # the older of two is newer than a checkpoint, mostly
    elif source == "checkpoint":
        every = settings["checkpoint.every"] = SAVE_EVERY
        settings["checkpoint.snapshot_every"] = 0
    else:
        every, settings["checkpoint.every"] = SAVE_EVERY, NEVER
    with joined_nodes(num_nodes) as nodes:
        first = 0 if number % 3 == 0 else this.randrange(num_nodes)
        lost = [nodes[(first + offset) % num_nodes] for offset in range(num_lost)]
        step = this.randrange(1 + every, 16)
        run_dir = folder / f"round-{number}-{source}"
        launch = Launch(nodes, settings, run_dir, 1 if by == "kill" else 2)
        if lost:
            found = launch.lose(lost, step, by)
        else:
            found, source = launch.damage_snapshots(step, this)
    wrong = []
    if found.source != source:
        wrong.append(f"went on from a {found.source}")
    if found.num_repeated > 2 * every:  # a save is complete some steps after it has begun, but before the next begins
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
    parser.add_argument("--lose", type=int, default=1, choices=(0, 1, 2), help="nodes lost at once")
    parser.add_argument("--by", default="kill", choices=get_args(By), help="link: with three nodes")
    parser.add_argument("--beside_checkpoints", action="store_true", help="go on from checkpoints, too")
    options = parser.parse_args()
    if reason := testbed_problem():
        sys.exit(f"skipped: {reason}")
    num_wrong, seconds = 0, defaultdict[str, list[float]](list)
    sources: list[Source] = ["snapshot", "checkpoint"] if options.beside_checkpoints else ["snapshot"]
    with tempfile.TemporaryDirectory(prefix="lost-") as name:
        folder = Path(name)
        corpus = prepare_corpus(folder)
        undisturbed = undisturbed_steps(corpus, folder)
        numbers = range(options.first, options.first + options.rounds)
        for number, source in product(numbers, sources):
            try:
                found, wrong = lose_nodes(number, options.lose, corpus, folder, source, options.by)
            except RuntimeError as error:
                print(f"{number:>3} WRONG: {error}", flush=True)
                num_wrong += 1
                continue
            wrong = wrong or ("" if found.steps == undisturbed else "OTHER LOSSES")
            num_wrong += bool(wrong)
            seconds[found.source].append(found.seconds)
            repeated = f"{found.num_repeated} steps again, next step after {found.seconds:.1f} s"
            lost = found.lost or "no node"
            print(f"{number:>3} {wrong or 'right'}: lost {lost}, {found.source}, {repeated}", flush=True)
    for kind, each in seconds.items():
        print(f"{kind}: median of {median(each):.1f} s from death to the next step, {min(each):.1f} to {max(each):.1f}")
    print(f"{num_wrong} of {len(numbers) * len(sources)} wrong")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
