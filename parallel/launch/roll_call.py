"""All nodes of a job meet before it starts, one process each, and the first one says what is wrong with whom.

first node      serves a store -> reads the clock for whoever asks -> has everybody's facts, or waited long enough
every node      asks for the clock -> tells its facts -> waits for the verdict, which ends it alike everywhere
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed as dist

from parallel.errors import ConfigError
from parallel.launch.node_facts import NodeFacts, find_problems

NUM_CLOCK_QUESTIONS = 5
POLL_SECONDS = 0.002


def meet(endpoint: tuple[str, int], is_host: bool, node: str, wait_seconds: float) -> dist.Store:
    """The store of the first node. Raises ConfigError with this node's name where it cannot be served, or reached."""
    address, port = endpoint
    try:
        timeout = timedelta(seconds=wait_seconds)
        return dist.TCPStore(address, port, is_master=is_host, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, OSError) as error:
        if is_host:
            raise ConfigError(f"{node}: port {port} cannot be served here ({_line(error)}); choose another") from error
        raise ConfigError(
            f"{node}: {address}:{port} cannot be reached within {wait_seconds:g} s: start the first node, and let "
            f"its ports {port - 1} and {port} through the firewall"
        ) from error


def answer(store: dist.Store, facts: NodeFacts, num_nodes: int, wait_seconds: float) -> list[str]:
    """Of a node that is not the first: tell the facts, and return the problems of all. Raises ConfigError."""
    number = store.add("nodes/number", 1)
    if number >= num_nodes:
        raise ConfigError(f"{facts.name}: is one node too many: {num_nodes} were announced (NNODES)")
    try:
        facts = replace(facts, clock_seconds=_clock_difference(store, number))
        store.set(f"nodes/facts/{number}", json.dumps(asdict(facts)))
        store.wait(["nodes/verdict"], timedelta(seconds=2 * wait_seconds))
        return json.loads(store.get("nodes/verdict"))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{facts.name}: the first node is gone, or does not answer: {_line(error)}") from error
    finally:
        _attempt_to_leave(store)


def call(
    store: dist.Store, facts: NodeFacts, num_nodes: int, names: Sequence[str], wait_seconds: float
) -> tuple[list[NodeFacts], list[str]]:
    """Of the first node: (everybody's facts, the problems), the same for all."""
    found, num_answered = {0: facts}, [0] * num_nodes
    deadline = time.monotonic() + wait_seconds
    while len(found) < num_nodes and time.monotonic() < deadline:
        for number in range(1, store.add("nodes/number", 0) + 1):
            if number < num_nodes and store.add(f"nodes/asked/{number}", 0) > num_answered[number]:
                num_answered[number] += 1
                store.set(f"nodes/clock/{number}/{num_answered[number]}", repr(time.time()))
            if number not in found and store.check([f"nodes/facts/{number}"]):
                found[number] = NodeFacts(**json.loads(store.get(f"nodes/facts/{number}")))
        time.sleep(POLL_SECONDS)
    nodes = [found[number] for number in sorted(found)]
    problems = _absent(nodes, num_nodes, names, wait_seconds) + find_problems(nodes)
    store.set("nodes/verdict", json.dumps(problems))
    _wait_until_read(store, num_others=len(nodes) - 1)
    return nodes, problems


def _absent(nodes: Sequence[NodeFacts], num_nodes: int, names: Sequence[str], wait_seconds: float) -> list[str]:
    here = ", ".join(node.name for node in nodes)
    if len(nodes) == num_nodes:
        return []
    absent = [name for name in names if not any(node.is_called(name) for node in nodes)]
    who = f"; missing: {', '.join(absent)}" if absent else ""
    return [f"{len(nodes)} of {num_nodes} nodes have come within {wait_seconds:g} s: {here}{who}"]


def _clock_difference(store: dist.Store, number: int) -> float:
    """Seconds that this node is ahead. The quickest of a few answers is the closest: the first node may be busy."""
    best = (float("inf"), 0.0)
    for question in range(1, NUM_CLOCK_QUESTIONS + 1):
        asked = time.time()
        store.add(f"nodes/asked/{number}", 1)
        theirs = float(store.get(f"nodes/clock/{number}/{question}"))
        took = time.time() - asked
        best = min(best, (took, asked + took / 2 - theirs))
    took, ahead = best
    return ahead if abs(ahead) > took else 0.0  # not known better than that


def _attempt_to_leave(store: dist.Store) -> None:
    try:
        store.add("nodes/num_left", 1)
    except (RuntimeError, ValueError):
        return


def _wait_until_read(store: dist.Store, num_others: int, seconds: float = 10.0) -> None:
    """The store goes with this process."""
    deadline = time.monotonic() + seconds
    while store.add("nodes/num_left", 0) < num_others and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
