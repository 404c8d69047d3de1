"""A check before a job starts, by one process on each node: all nodes are present and agree.

    python -m gpt.preflight --nodes 2 --meet node0:29501 [--names node0,node1] -- ARGUMENTS OF THE PROGRAM

    first node      answers with its clock's time, collects the facts of all nodes, sets the verdict
    other nodes     ask the first node for its clock's time, report their facts, ask for the verdict

The first node sets the verdict, a list of problems, when all nodes have reported or the time is over. Every node reads
the same list, so either all of them start the job or none does; the exit code is then 2. All need the same secret of
parallel/launch/channel.py, and so the same folder of the job.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4

from parallel.launch.channel import Channel, read_secret
from parallel.launch.node_facts import Job, NodeFacts, find_facts, find_problems, seconds_ahead
from parallel.launch.route import find_route, resolve
from parallel.validation.errors import ConfigError, first_line
from parallel.validation.fields import parse_json

POLL_SECONDS, NODES_PER_POLL = 0.2, 128  # of more nodes each asks less often
SILENT_SECONDS = 6.0  # after which a first node that had answered has ended
FIRST_NODE = "the first node"

DescribeJob = Callable[[Sequence[str], int | None], Job]  # (the program's arguments, number of ranks if known) -> Job


def check_nodes(options: argparse.Namespace, job: Job) -> int:
    """Compare the nodes, by one process per node, and return the number of this one, in the order of their reports.

    Raises ConfigError on all nodes if one of them is wrong.
    """
    route = find_route(options.meet)
    facts = find_facts(job, route.local_address)
    meeting = Meeting(facts, options.nodes)
    if options.nodes > 1:
        channel, port = Channel(read_secret(job.folder)), resolve(options.meet)[1]
        if not route.is_host:
            return report(First(channel, options.meet, facts.name, options.wait), facts, options.nodes)
        try:
            channel.serve((route.local_address, port), FIRST_NODE, meeting.answer)
        except OSError as error:
            raise ConfigError(f"{facts.name}: port {port} cannot be served here ({error}); choose another") from error
    refuse(meeting.collect([name for name in options.names.split(",") if name], options.wait))
    names = [node.name for node in meeting.found.values()]
    count = "1 node is ready" if len(names) == 1 else f"{len(names)} nodes are alike"
    sys.stderr.write(f"preflight: {count}: {', '.join(names)}\n")
    return 0


def refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("preflight: " + "\n  ".join(problems))


class Meeting:
    """The nodes that have reported to the first one, and the verdict on them."""

    def __init__(self, own: NodeFacts, num_nodes: int):
        self.found = {"": own}  # by the random name of a process, in the order of their reports
        self._num_nodes, self._told = num_nodes, set[str]()
        self._verdict: list[str] | None = None

    def answer(self, request: dict[str, Any]) -> str:
        """Return the answer to a question of another node."""
        who = str(request["by"])
        if "facts" in request and self._verdict is None and len(self.found) < self._num_nodes:
            self.found.setdefault(who, parse_json(NodeFacts, request["facts"]))
        number = list(self.found).index(who) if who in self.found else None
        if self._verdict is not None:
            self._told.add(who)
        return json.dumps({"clock": time.time(), "number": number, "verdict": self._verdict})

    def collect(self, names: Sequence[str], wait_seconds: float) -> list[str]:
        """Return the problems of all nodes when they have reported, and read the verdict, or the time is over."""
        deadline = time.monotonic() + wait_seconds
        while len(self.found) < self._num_nodes and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        nodes = list(self.found.values())
        problems = find_problems(nodes)
        if len(nodes) < self._num_nodes:
            missing = [name for name in names if not any(node.has_name(name) for node in nodes)]
            which = f"; missing: {', '.join(missing)}" if missing else ""
            here = f"{', '.join(node.name for node in nodes)}{which}"
            problems.insert(
                0, f"{len(nodes)} of {self._num_nodes} nodes have reported within {wait_seconds:g} s: {here}"
            )
        self._verdict = problems
        deadline = time.monotonic() + wait_seconds
        while len(self._told & set(self.found)) < len(nodes) - 1 and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return problems


class First:
    """The first node, as another one sees it: it has to answer within `wait_seconds`, and from then on always."""

    def __init__(self, channel: Channel, endpoint: str, name: str, wait_seconds: float):
        self._channel, self._endpoint, self._name, self._by = channel, endpoint, name, uuid4().hex
        self._until = time.monotonic() + wait_seconds
        port = int(endpoint.rpartition(":")[2])
        self._remedy = (
            f"{endpoint} cannot be reached within {wait_seconds:g} s: start the first node, and let its ports "
            f"{port - 1} and {port} through the firewall"
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer. Raises ConfigError if there is none."""
        while True:
            try:
                question = self._channel.ask(resolve(self._endpoint), FIRST_NODE, request | {"by": self._by})
                answer = json.loads(self._channel.run(question))
                self._until = time.monotonic() + SILENT_SECONDS
                self._remedy = "the first node has ended, or does not answer; see its output"
                return answer
            except ConfigError as error:
                raise ConfigError(f"{self._name}: {error}") from error
            except (OSError, ValueError) as error:
                if time.monotonic() >= self._until:
                    raise ConfigError(f"{self._name}: {self._remedy} ({first_line(error)})") from error
            time.sleep(POLL_SECONDS)


def report(first: First, facts: NodeFacts, num_nodes: int) -> int:
    """Report the facts of a node other than the first; return its number. Raises ConfigError if there are problems."""
    asked = time.time()
    there = first.ask()["clock"]  # within `REPLY_SECONDS`
    facts = replace(facts, clock_seconds=-seconds_ahead(there, asked, time.time()))
    answer = first.ask(facts=json.dumps(asdict(facts)))
    while answer["number"] is not None and answer["verdict"] is None:
        time.sleep(POLL_SECONDS * max(1.0, num_nodes / NODES_PER_POLL))
        answer = first.ask()
    if answer["number"] is None:
        raise ConfigError(
            f"{facts.name}: is one node too many: NNODES={num_nodes}; raise it, or start the job on {num_nodes} nodes"
        )
    if answer["verdict"]:
        # A scheduler ends all nodes as soon as one has failed: the first one, which prints the problems, ends before.
        with suppress(ConfigError):
            while True:
                time.sleep(POLL_SECONDS)
                first.ask()
        raise ConfigError(f"{facts.name}: the preflight has found problems; the first node prints them")
    return answer["number"]


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
