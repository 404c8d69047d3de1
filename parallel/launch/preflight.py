"""A check before a job starts, by one process on each node: all nodes are present and agree.

    python -m gpt.preflight --nodes 2 --meet node0:29501 [--names node0,node1] -- ARGUMENTS OF THE PROGRAM

    first node      serves a store, replies with its clock's time, collects the facts of all nodes, sets the verdict
    other nodes     request the first node's clock's time, report their facts, wait for the verdict

The first node sets the verdict, a list of problems, when all nodes have reported or the time is over. Every node reads
the same list, so either all of them start the job or none does; the exit code is then 2.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from parallel.launch.node_facts import (
    MARK_SECONDS,
    Job,
    NodeFacts,
    find_facts,
    find_problems,
    marked,
    seconds_ahead,
    sees,
)
from parallel.launch.route import find_route, resolve
from parallel.store import Decisions
from parallel.validation.errors import ConfigError, first_line
from parallel.validation.fields import parse_json
from parallel.world import World

NUM_CLOCK_REQUESTS = 5
POLL_SECONDS = 0.002

DescribeJob = Callable[[Sequence[str], int | None], Job]  # (the program's arguments, number of ranks if known) -> Job


def check_nodes(options: argparse.Namespace, job: Job) -> int:
    """Compare the nodes, by one process per node, and return the number of this one, in the order of their reports.

    Raises ConfigError on all nodes if one of them is wrong.
    """
    route = find_route(options.meet)
    # The facts are found before the store is served: the first node's time limit then need not include their time.
    facts = find_facts(job, route.local_address)
    store = connect(resolve(options.meet), route.is_host, facts.name, options.wait)
    if not route.is_host:
        own_number, problems = report(store, facts, options.nodes, options.wait, job.folder)
        if problems:
            # A scheduler ends all nodes as soon as one has failed: the first one, and with it the store, ends before.
            with suppress(RuntimeError):
                store.wait(["nodes/end"], timedelta(seconds=options.wait))
            raise ConfigError(f"{facts.name}: the preflight has found problems; the first node prints them")
        return own_number
    names = [name for name in options.names.split(",") if name]
    with marked(job.folder) as mark:
        nodes, problems = collect(store, facts, options.nodes, names, options.wait, mark)
    refuse(problems)
    number = "1 node is ready" if len(nodes) == 1 else f"{len(nodes)} nodes are alike"
    sys.stderr.write(f"preflight: {number}: {', '.join(node.name for node in nodes)}\n")
    return 0


def check_ranks(world: World, job: Job) -> None:
    """Compare the nodes of a started job, each represented by its first rank. Raises ConfigError on all ranks."""
    own = asdict(find_facts(job)) if world.local_rank == 0 else None
    refuse(
        Decisions(world.rank, world.size).decide(
            own, lambda by_rank: find_problems([NodeFacts(**facts) for facts in by_rank if facts])
        )
    )


def refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("preflight: " + "\n  ".join(problems))


def connect(endpoint: tuple[str, int], is_host: bool, node: str, wait_seconds: float) -> dist.Store:
    """Return a connection to the first node's store. Raises ConfigError if it cannot be served or reached."""
    address, port = endpoint
    try:
        timeout = timedelta(seconds=wait_seconds)
        return dist.TCPStore(address, port, is_master=is_host, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, OSError) as error:
        if is_host:
            problem = f"port {port} cannot be served here ({first_line(error)}); choose another"
        else:
            problem = (
                f"{address}:{port} cannot be reached within {wait_seconds:g} s: start the first node, and let its "
                f"ports {port - 1} and {port} through the firewall"
            )
        raise ConfigError(f"{node}: {problem}") from error


def report(
    store: dist.Store, facts: NodeFacts, num_nodes: int, wait_seconds: float, folder: Path = Path()
) -> tuple[int, list[str]]:
    """Report the facts of a node other than the first; return its number, and all problems. Raises ConfigError."""
    number = store.add("nodes/number", 1)
    if number >= num_nodes:
        raise ConfigError(
            f"{facts.name}: is one node too many: NNODES={num_nodes}; raise it, or start the job on {num_nodes} nodes"
        )
    try:
        is_shared = sees(folder, store.get("nodes/mark").decode(), min(MARK_SECONDS, wait_seconds / 2))
        # The clocks are compared before the facts are set: as soon as it has all facts, the first node stops replying.
        facts = replace(facts, clock_seconds=clock_difference(store, number), shares_folder=is_shared)
        store.set(f"nodes/facts/{number}", json.dumps(asdict(facts)))
        store.wait(["nodes/verdict"], timedelta(seconds=2 * wait_seconds))
        return number, [str(problem) for problem in json.loads(store.get("nodes/verdict"))]
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{facts.name}: the first node has ended, or does not answer: {first_line(error)}; see its output"
        ) from error
    finally:
        # Tells the first node, which serves the store for so long, that this one has read the verdict.
        with suppress(RuntimeError, ValueError):
            store.add("nodes/num_left", 1)


def clock_difference(store: dist.Store, number: int) -> float:
    """Return the seconds by which this node's clock is ahead of the first node's, by the fastest of several replies.

    The first node may be busy with other nodes.
    """
    replies = []
    for request in range(NUM_CLOCK_REQUESTS):
        asked = time.time()
        store.set(f"nodes/asked/{number}/{request}", "")
        there = float(store.get(f"nodes/clock/{number}/{request}"))
        replies.append((asked, there, time.time()))
    asked, there, answered = min(replies, key=lambda reply: reply[2] - reply[0])
    return -seconds_ahead(there, asked, answered)


def collect(
    store: dist.Store, facts: NodeFacts, num_nodes: int, names: Sequence[str], wait_seconds: float, mark: str = ""
) -> tuple[list[NodeFacts], list[str]]:
    """Serve the other nodes, and return (the facts of all nodes that reported, the problems). For the first node.

    The other nodes look for the file `mark`, unless it is empty. Returns when all of them have read the verdict.
    """
    store.set("nodes/mark", mark)
    found, num_replies = {0: facts}, [0] * num_nodes
    deadline = time.monotonic() + wait_seconds
    while len(found) < num_nodes and time.monotonic() < deadline:
        for number in range(1, min(num_nodes, store.add("nodes/number", 0) + 1)):
            request = f"{number}/{num_replies[number]}"
            if num_replies[number] < NUM_CLOCK_REQUESTS and store.check([f"nodes/asked/{request}"]):
                store.set(f"nodes/clock/{request}", repr(time.time()))
                num_replies[number] += 1
            if number not in found and store.check([f"nodes/facts/{number}"]):
                found[number] = parse_json(NodeFacts, store.get(f"nodes/facts/{number}"))
        time.sleep(POLL_SECONDS)
    nodes = [found[number] for number in sorted(found)]
    problems = find_problems(nodes)
    if len(nodes) < num_nodes:
        missing = [name for name in names if not any(node.has_name(name) for node in nodes)]
        which = f"; missing: {', '.join(missing)}" if missing else ""
        here = ", ".join(node.name for node in nodes)
        problems.insert(0, f"{len(nodes)} of {num_nodes} nodes have reported within {wait_seconds:g} s: {here}{which}")
    # The store ends with this process. So it waits, after it has set the verdict, until all nodes have read it.
    store.set("nodes/verdict", json.dumps(problems))
    deadline = time.monotonic() + wait_seconds
    while store.add("nodes/num_left", 0) < len(nodes) - 1 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return nodes, problems


def split_words(words: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Return (the preflight's own options, the arguments of the program after `--`)."""
    end = list(words).index("--") if "--" in words else len(words)
    return words[:end], list(words[end + 1 :])


def main(words: Sequence[str], describe_job: DescribeJob) -> None:
    """Run the preflight, and print the job's folder, then the number of this node. Raises ConfigError.

    `words` are the preflight's options, and after `--` the arguments of the program.
    """
    parser = argparse.ArgumentParser(
        prog="python -m gpt.preflight", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wait", type=float, default=120.0, help="seconds to wait for the others")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--num_ranks", type=int, help="ranks of the job")
    parser.add_argument("--meet", required=True, help="HOST:PORT of a store on the first node")
    parser.add_argument("--names", default="", help="names of the nodes, so that a missing one can be named")
    own, arguments = split_words(words)
    options = parser.parse_args(own)
    job = describe_job(arguments, options.num_ranks)
    sys.stdout.write(f"{job.folder}\n{check_nodes(options, job)}\n")
