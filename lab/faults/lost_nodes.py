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
import random
import re
import signal
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
from lab.acceptance.child import as_options
from lab.faults.damage import DAMAGES
from lab.faults.runs import OPTIONS, Job, Steps, prepare_corpus
from lab.faults.testbed import Node, joined_nodes, testbed_problem
from zero.checkpoint.layout_file import rank_file

NUM_RANKS, SAVE_EVERY, SELDOM = 2, 3, 7
NEVER = 1000
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


def launch(
    nodes: list[Node], settings: dict[str, object], run_dir: Path, min_nodes: int = 1, num_ranks: int = NUM_RANKS
) -> Job:
    """Launch a run elastically, by an agent on each node, with so many ranks on each."""
    names = ",".join(node.address for node in nodes)
    own = ["--nodes", names, f"--num_ranks={num_ranks}", f"--min_nodes={min_nodes}", "--wait=60"]
    own += [f"--no_arbiter={int(min_nodes == 1)}", "--"]  # of two nodes, one goes on
    program = ["pretrain_gpt.py", *as_options(settings | {"run.dir": run_dir})]
    words = [sys.executable, "-m", "gpt.elastic", *own, *program]
    commands = {node.name: node.command(words, "mount -t tmpfs tmpfs /dev/shm") for node in nodes}
    return Job(commands, run_dir, GLOO_SOCKET_IFNAME="e0")


def lose(job: Job, lost: list[Node], step: int, by: By = "kill") -> Loss:
    """Lose nodes after a step, wait for the end, and return what it has cost."""
    job.wait_for_step(step)
    for node in lost:
        if by == "kill":
            node.kill_processes()
        else:
            node.set_link(is_up=False)
    return _end_after(job, lost)


def damage_snapshots(
    job: Job, nodes: list[Node], step: int, chance: random.Random, num_ranks: int
) -> tuple[Loss, Source]:
    """Kill all ranks after a step and damage a rank's file in the newest snapshot, or in all, on each node.

    Return what it has cost, and from what the run has to go on.
    """
    job.wait_for_step(step)
    while any(len(_snapshots(job, node)) < 2 for node in nodes):
        time.sleep(0.005)  # until two are complete, before the older one is deleted
    for agent in job.processes.values():
        agent.send_signal(signal.SIGSTOP)  # it starts the ranks again only when the files are damaged
    for node in nodes:
        node.kill_processes(but=job.processes[node.name].pid)
    found = [_snapshots(job, node) for node in nodes]
    every = sorted({step for on_node in found for step in on_node})
    damaged = every if chance.random() < 0.5 else every[-1:]
    file = rank_file(Path(), chance.randrange(num_ranks * len(nodes)))
    for on_node in found:
        for path in (on_node[step] / file for step in damaged if step in on_node):
            if path.exists():
                chance.choice([*DAMAGES.values()])(path)
    whole = set.intersection(*map(set, found)).difference(damaged)
    newest = max(checkpoints(job.run_dir / CHECKPOINTS), default=0)
    for agent in job.processes.values():
        agent.send_signal(signal.SIGCONT)
    return _end_after(job, []), "snapshot" if max(whole, default=0) > newest else "checkpoint"


def _snapshots(job: Job, node: Node) -> dict[int, Path]:
    """Return the snapshots in a node's memory by step, as this process sees it."""
    (folder,) = Path(f"/proc/{job.processes[node.name].pid}/root/dev/shm/zero-gpt").iterdir()
    return checkpoints(folder)


def _end_after(job: Job, lost: list[Node]) -> Loss:
    died, num_done = time.time(), len(read_steps(job.run_dir))
    names = [node.name for node in lost]
    steps = job.run_to_end(but=names)
    records = map(json.loads, (job.run_dir / "metrics.jsonl").read_text().splitlines())
    next_time = min(record["unix_time"] for record in records if record["unix_time"] > died + 1.0)
    source, resumed = re.findall(r"resumed from (\S+), after step (\d+)", job.said)[-1]
    kind = "snapshot" if source.startswith("/dev/shm") else "checkpoint"
    return Loss(" and ".join(names), kind, num_done - int(resumed), next_time - died, steps)


def lose_nodes(
    number: int,
    num_lost: int,
    corpus: Path,
    folder: Path,
    source: Source = "snapshot",
    by: By = "kill",
    num_ranks: int = NUM_RANKS,
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
        job = launch(nodes, settings, run_dir, 1 if by == "kill" else 2, num_ranks)
        if lost:
            found = lose(job, lost, step, by)
        else:
            found, source = damage_snapshots(job, nodes, step, this, num_ranks)
    wrong = []
    if found.source != source:
        wrong.append(f"went on from a {found.source}")
    if found.num_repeated > 2 * every:  # a save is complete some steps after it has begun, but before the next begins
        wrong.append(f"repeated {found.num_repeated} steps")
    return found, ", ".join(wrong)


def undisturbed_steps(corpus: Path, folder: Path) -> Steps:
    """Return the steps of a run that loses nothing, on two nodes."""
    with joined_nodes() as nodes:
        return launch(nodes, SETTINGS | {"data.path": corpus}, folder / "undisturbed").run_to_end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--lose", type=int, default=1, choices=(0, 1, 2), help="nodes lost at once")
    parser.add_argument("--by", default="kill", choices=get_args(By), help="link: with three nodes")
    parser.add_argument("--beside_checkpoints", action="store_true", help="go on from checkpoints, too")
    options = parser.parse_args()
    if options.lose != 1 and (options.beside_checkpoints or options.by == "link"):
        parser.error(f"--beside_checkpoints and --by link need --lose=1, not {options.lose}")
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
