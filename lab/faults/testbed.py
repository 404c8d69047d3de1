"""Two nodes on one machine: network namespaces with their own names, addresses and disks, joined by a bridge.

    n1  10.77.0.1  e0 ---- v1 [ bridge, in a namespace too ] v2 ---- e0  10.77.0.2  n2

This needs root and Linux's namespaces. Everything is removed at the end, and the machine's own network is not changed.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lab.acceptance.child import ROOT

BURST_SECONDS = 0.002  # a link that was idle for so long passes at once what it could have carried meanwhile


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    namespace: str
    switch: str  # the namespace of the bridge
    port: str  # the name of its port on the bridge

    def command(self, words: list[str], before: str = "") -> list[str]:
        """Return the command that runs `words` on the node, after the shell commands `before`.

        What these mount is mounted for this command only.
        """
        script = f"hostname {self.name}; {before}\nexec {shlex.join(words)}"
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "bash", "-ec", script]

    def kill_processes(self, but: int | None = None) -> None:
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        for pid in set(map(int, found.stdout.split())) - {but}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def limit(self, mbit_per_second: float) -> None:
        """Limit the rate at which the node sends, and, at its port on the bridge, the rate at which it receives."""
        for namespace, device in ((self.namespace, "e0"), (self.switch, self.port)):
            burst_bytes = round(mbit_per_second / 8 * 1e6 * BURST_SECONDS)
            rate = ["rate", f"{mbit_per_second}mbit", "burst", str(burst_bytes), "latency", "100ms"]
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def set_link(self, *, is_up: bool) -> None:
        _ip("-n", self.switch, "link", "set", self.port, "up" if is_up else "down")


def testbed_problem() -> str | None:
    """Return the reason why this machine cannot run the two nodes; None if it can."""
    try:
        with joined_nodes():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", "") or str(error)
        return f"no network namespaces here: {message.strip()}"


@contextmanager
def joined_nodes(num_nodes: int = 2) -> Iterator[list[Node]]:
    """Make the nodes, and remove them at the end.

    Raises OSError or CalledProcessError if the machine refuses.
    """
    prefix = f"zero{os.getpid()}"
    switch = f"{prefix}sw"
    nodes = [
        Node(f"n{number}", f"10.77.0.{number}", f"{prefix}n{number}", switch, f"v{number}")
        for number in range(1, num_nodes + 1)
    ]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for node in nodes:
            _ip("netns", "add", node.namespace)
            _ip("-n", switch, "link", "add", node.port, "type", "veth", "peer", "name", "e0", "netns", node.namespace)
            _ip("-n", switch, "link", "set", node.port, "master", "bridge0", "up")
            _ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", "e0")
            for device in ("e0", "lo"):
                _ip("-n", node.namespace, "link", "set", device, "up")
        yield nodes
    finally:
        for node in nodes:
            node.kill_processes()
        for namespace in (*(node.namespace for node in nodes), switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def launch_on(nodes: list[Node], ranks_per_node: int, *words: str) -> str:
    """Start the ranks of a module on all nodes, and return what they print. Raises RuntimeError if one fails."""
    launch = [sys.executable, "-m", "parallel.launch", f"--nnodes={len(nodes)}", f"--nproc-per-node={ranks_per_node}"]
    launch += [f"--master-addr={nodes[0].address}", "--master-port=29400"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "e0"}
    running = []
    for node in nodes:
        where = [f"--node-rank={nodes.index(node)}", f"--local-addr={node.address}", "-m"]
        command = node.command([*launch, *where, *words])
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"{' '.join(words)} has failed on a node; its message is above")
    return "".join(said)


def ssh_to(nodes: list[Node], folder: Path) -> Path:
    """Write a script `ssh` that runs commands on the nodes, and return its folder, which must be first on PATH."""
    folder.mkdir(parents=True)
    lines = ["#!/usr/bin/env bash", "host=${*: -2:1} command=${*: -1}", 'case "$host" in']
    for node in nodes:
        enter = shlex.join(["ip", "netns", "exec", node.namespace, "unshare", "--uts", "bash", "-c"])
        lines.append(f'{node.address}) exec {enter} "hostname {node.name}; $command" ;;')
    lines.append("esac")
    script = folder / "ssh"
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    return folder


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout
