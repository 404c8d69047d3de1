"""A comparison of all nodes before a job starts, by one process per node, through a store that the first node serves.

    first node      serves the store, replies with its clock's time, collects the facts of all nodes, sets the verdict
    other nodes     request the first node's clock's time, report their facts, wait for the verdict

The first node sets the verdict, a list of problems, when all nodes have reported or the time is over. Every node reads
the same list, so either all of them start the job or none does.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed as dist

from parallel.errors import ConfigError, first_line
from parallel.launch.node_facts import MARK_SECONDS, NodeFacts, find_problems, sees

NUM_CLOCK_REQUESTS = 5
POLL_SECONDS = 0.002


def connect(endpoint: tuple[str, int], is_host: bool, node: str, wait_seconds: float) -> dist.Store:
    """Return a connection to the first node's store. Raises ConfigError if it cannot be served or reached."""
    address, port = endpoint
    try:
        timeout = timedelta(seconds=wait_seconds)
        return dist.TCPStore(address, port, is_master=is_host, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, OSError) as error:
        if is_host:
            raise ConfigError(
                f"{node}: port {port} cannot be served here ({first_line(error)}); choose another"
            ) from error
        raise ConfigError(
            f"{node}: {address}:{port} cannot be reached within {wait_seconds:g} s: start the first node, and let "
            f"its ports {port - 1} and {port} through the firewall"
        ) from error


def report_facts(store: dist.Store, facts: NodeFacts, num_nodes: int, wait_seconds: float) -> list[str]:
    """Report the facts of a node other than the first; return the problems of all. Raises ConfigError."""
    number = store.add("nodes/number", 1)
    if number >= num_nodes:
        raise ConfigError(
            f"{facts.name}: is one node too many: NNODES={num_nodes}; raise it, or start the job on {num_nodes} nodes"
        )
    try:
        # The clocks are compared before the facts are set: as soon as it has all facts, the first node stops replying.
        facts = replace(facts, clock_seconds=_clock_difference(store, number))
        is_shared = sees(store.get("nodes/mark").decode(), min(MARK_SECONDS, wait_seconds / 2))
        facts = replace(facts, shares_folder=is_shared)
        store.set(f"nodes/facts/{number}", json.dumps(asdict(facts)))
        store.wait(["nodes/verdict"], timedelta(seconds=2 * wait_seconds))
        return json.loads(store.get("nodes/verdict"))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{facts.name}: the first node has ended, or does not answer: {first_line(error)}; see its output"
        ) from error
    finally:
        # Tells the first node, which serves the store for so long, that this one has read the verdict.
        with suppress(RuntimeError, ValueError):
            store.add("nodes/num_left", 1)


def wait_for_end(store: dist.Store, seconds: float) -> None:
    """Wait until the first node has ended, and its store with it, or the time is over."""
    with suppress(RuntimeError):
        store.wait(["nodes/end"], timedelta(seconds=seconds))


def collect_facts(
    store: dist.Store, facts: NodeFacts, num_nodes: int, names: Sequence[str], wait_seconds: float, mark: str = ""
) -> tuple[list[NodeFacts], list[str]]:
    """Serve the other nodes, and return (the facts of all nodes that reported, the problems). For the first node.

    The other nodes look for the file `mark`, unless it is empty. Returns when all of them have read the verdict.
    """
    store.set("nodes/mark", mark)
    found, num_replies = {0: facts}, [0] * num_nodes
    deadline = time.monotonic() + wait_seconds
    while len(found) < num_nodes and time.monotonic() < deadline:
        for number in range(1, store.add("nodes/number", 0) + 1):
            if number < num_nodes and store.add(f"nodes/asked/{number}", 0) > num_replies[number]:
                num_replies[number] += 1
                store.set(f"nodes/clock/{number}/{num_replies[number]}", repr(time.time()))
            if number not in found and store.check([f"nodes/facts/{number}"]):
                found[number] = NodeFacts(**json.loads(store.get(f"nodes/facts/{number}")))
        time.sleep(POLL_SECONDS)
    nodes = [found[number] for number in sorted(found)]
    problems = _missing(nodes, num_nodes, names, wait_seconds) + find_problems(nodes)
    # The store ends with this process. So it waits, after it has set the verdict, until all nodes have read it.
    store.set("nodes/verdict", json.dumps(problems))
    deadline = time.monotonic() + wait_seconds
    while store.add("nodes/num_left", 0) < len(nodes) - 1 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return nodes, problems


def _missing(nodes: Sequence[NodeFacts], num_nodes: int, names: Sequence[str], wait_seconds: float) -> list[str]:
    here = ", ".join(node.name for node in nodes)
    if len(nodes) == num_nodes:
        return []
    missing = [name for name in names if not any(node.has_name(name) for node in nodes)]
    which = f"; missing: {', '.join(missing)}" if missing else ""
    return [f"{len(nodes)} of {num_nodes} nodes have reported within {wait_seconds:g} s: {here}{which}"]


def _clock_difference(store: dist.Store, number: int) -> float:
    """Return the seconds by which this node's clock is ahead of the first node's; 0 if a reply took longer than that.

    Of several requests the one with the fastest reply counts, because the first node may be busy with other nodes.
    """
    best = (float("inf"), 0.0)
    for request in range(1, NUM_CLOCK_REQUESTS + 1):
        start = time.time()
        store.add(f"nodes/asked/{number}", 1)
        first_node_time = float(store.get(f"nodes/clock/{number}/{request}"))
        reply_seconds = time.time() - start
        # The first node is assumed to have read its clock halfway between the request and the reply.
        best = min(best, (reply_seconds, start + reply_seconds / 2 - first_node_time))
    reply_seconds, ahead = best
    return ahead if abs(ahead) > reply_seconds else 0.0
