"""A check before a job starts, by one process on each node: all nodes are present and agree.

    python -m parallel.launch.preflight --nodes 2 --meet node0:29501 [--names node0,node1] -- ARGUMENTS OF THE PROGRAM

It reports what differs on which node, with exit code 2. Run like this, it compares the program's arguments literally. A
program that knows the settings and files that they stand for calls `main` with a `describe_job` (gpt/preflight.py,
which scripts/launch runs before every training).
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence

from parallel.errors import ConfigError, exit_on_config_error
from parallel.launch.node_facts import Job, find_facts, marked
from parallel.launch.roll_call import collect_facts, connect, report_facts, wait_for_end
from parallel.launch.route import find_route, resolve
from parallel.store import shared_store
from parallel.world import World

DescribeJob = Callable[[Sequence[str], int | None], Job]  # (the program's arguments, number of ranks if known) -> Job


def arguments_only(arguments: Sequence[str], num_ranks: int | None) -> Job:
    """Return a Job whose settings are the program's arguments, unchanged."""
    return Job(settings=tuple(arguments))


def check_nodes(options: argparse.Namespace, job: Job) -> None:
    """Compare the nodes, by one process per node. Raises ConfigError on all nodes if one of them is wrong."""
    route = find_route(options.meet)
    # The facts are found before the store is served: the first node's time limit then need not include their time.
    facts = find_facts(job, route.local_address)
    store = connect(resolve(options.meet), route.is_host, facts.name, options.wait)
    if not route.is_host:
        if report_facts(store, facts, options.nodes, options.wait):
            # A scheduler ends all nodes as soon as one has failed: the first one prints the problems before.
            wait_for_end(store, options.wait)
            raise ConfigError(f"{facts.name}: the preflight has found problems; the first node prints them")
        return
    names = [name for name in options.names.split(",") if name]
    with marked(job.folder) as mark:
        nodes, problems = collect_facts(store, facts, options.nodes, names, options.wait, mark)
    if problems:
        raise ConfigError("preflight: " + "\n  ".join(problems))
    number = "1 node is ready" if len(nodes) == 1 else f"{len(nodes)} nodes are alike"
    sys.stderr.write(f"preflight: {number}: {', '.join(node.name for node in nodes)}\n")


def check_by_store(world: World, job: Job, wait_seconds: float) -> None:
    """Compare the nodes of a started job, each represented by its first rank. Raises ConfigError on all ranks."""
    store = shared_store()
    num_nodes = world.size // world.local_size
    if world.is_first:
        collect_facts(store, find_facts(job), num_nodes, [], wait_seconds)
    elif world.local_rank == 0:
        report_facts(store, find_facts(job), num_nodes, wait_seconds)
    # All ranks wait here for the verdict, which the first rank sets when every node has reported.
    if problems := json.loads(store.get("nodes/verdict")):
        raise ConfigError("preflight: " + "\n  ".join(problems))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every preflight, with a launcher and without."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--wait", type=float, default=120.0, help="seconds to wait for the others")


def split_words(words: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Return (the preflight's own options, the arguments of the program after `--`)."""
    end = list(words).index("--") if "--" in words else len(words)
    return words[:end], list(words[end + 1 :])


def main(words: Sequence[str], describe_job: DescribeJob = arguments_only) -> None:
    """Run the preflight, and print the job's folder. Raises ConfigError.

    `words` are the preflight's options, and after `--` the arguments of the program.
    """
    parser = argparse.ArgumentParser(prog="python -m parallel.launch.preflight", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--num_ranks", type=int, help="ranks of the job")
    parser.add_argument("--meet", required=True, help="HOST:PORT of a store on the first node")
    parser.add_argument("--names", default="", help="names of the nodes, so that a missing one can be named")
    own, arguments = split_words(words)
    options = parser.parse_args(own)
    job = describe_job(arguments, options.num_ranks)
    check_nodes(options, job)
    sys.stdout.write(f"{job.folder}\n")


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
