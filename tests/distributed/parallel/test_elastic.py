"""Agents of nodes, on ports of this machine, whose ranks are small programs."""

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from lab.acceptance.child import descendants, kill_all
from parallel.launch import elastic
from parallel.launch.membership import Record
from parallel.launch.node_facts import Job
from tests.programs import HANG_SECONDS, start_forked, wait_for_end

# Notes its start in a folder, and ends when a file tells it: with the code that stands there, or 0 if it is asked to.
RANK = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
folder, name = pathlib.Path(sys.argv[1]), os.environ["ZERO_START_OF_LAUNCH"].split()[1] + "-" + os.environ["RANK"]
(folder / f"{name}.tmp").write_text(f"{os.environ['WORLD_SIZE']} {os.environ['MASTER_PORT']}")
(folder / f"{name}.tmp").rename(folder / name)
while True:
    for end in (folder / "end", folder / f"end-{name}", folder / f"end-rank-{os.environ['RANK']}"):
        if end.exists():
            sys.exit(int(end.read_text() or 0))
    time.sleep(0.02)
"""


def run_agent(words: list[str]) -> None:
    elastic.main(words, lambda arguments, _: Job(settings=tuple(arguments)), lambda *_: None)


class Nodes:
    """Nodes of one rank each, and what their ranks have noted."""

    def __init__(self, folder: Path, num_nodes: int, *options: str):
        self.folder = folder
        (folder / "rank.py").write_text(RANK)
        self.names = [f"127.0.0.1:{port}" for port in free_pairs_of_ports(num_nodes)]
        # Without comparison of the nodes: on a busy machine the rates of their disks differ.
        self._options = ["--nodes", ",".join(self.names), "--wait=120", "--check=0", *options]
        self.rank_words: list[str] = []
        self.agents = {number: self.start(number) for number in range(num_nodes)}

    def start(self, number: int) -> BaseProcess:
        own = [*self._options, "--node", self.names[number], "--"]
        program = [str(self.folder / "rank.py"), str(self.folder), *self.rank_words]
        return start_forked(self.folder / f"agent-{number}.txt", run_agent, [*own, *program])

    def lose(self, number: int) -> None:
        """Kill the agent first, and then its ranks."""
        agent = self.agents[number]
        kill_all([agent.pid, *descendants(agent.pid)])
        agent.join()

    def sizes(self, start: int) -> list[str]:
        """Return the world size that each rank of a start has noted."""
        return [path.read_text().split()[0] for path in sorted(self.folder.glob(f"{start}-[0-9]"))]

    def wait_for(self, start: int, num_ranks: int) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while self.sizes(start) != [str(num_ranks)] * num_ranks:
            ended = [
                number for number, agent in self.agents.items() if agent.exitcode is not None and agent.exitcode >= 0
            ]
            assert not ended, [(self.folder / f"agent-{number}.txt").read_text() for number in ended]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def codes(self) -> list[int | None]:
        return [wait_for_end(agent) for agent in self.agents.values()]


def free_pairs_of_ports(number: int) -> list[int]:
    """Return ports below those that the system gives out, which are free like the ports after them."""
    found: list[int] = []
    for port in range(20000 + os.getpid() % 4000 * 2, 32000, 2):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("", port))
                other.bind(("", port + 1))
            except OSError:
                continue
        found.append(port)
        if len(found) == number:
            return found
    raise AssertionError("no free ports")


@pytest.fixture
def make_nodes() -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:

        def make(num_nodes: int, *options: str) -> Nodes:
            made.append(Nodes(Path(folder), num_nodes, *options))
            return made[-1]

        yield make
        for nodes in made:
            for agent in nodes.agents.values():
                if agent.is_alive():
                    kill_all([*descendants(agent.pid), agent.pid])


def test_the_loss_of_the_leader_costs_a_start_and_its_return_adds_it_again(make_nodes):
    nodes = make_nodes(3, "--grow_after=0")
    nodes.wait_for(1, 3)
    nodes.lose(0)
    nodes.wait_for(2, 2)
    nodes.agents[0] = nodes.start(0)
    nodes.wait_for(3, 3)
    (nodes.folder / "end").touch()
    assert nodes.codes() == [0, 0, 0]


def test_an_error_of_the_user_ends_the_job_and_failures_restart_it_up_to_the_limit(make_nodes):
    nodes = make_nodes(2, "--max_restarts=1")
    nodes.wait_for(1, 2)
    (nodes.folder / "end-1-1").write_text("1")
    nodes.wait_for(2, 2)
    (nodes.folder / "end-2-0").write_text("2")
    assert nodes.codes() == [2, 2]
    assert nodes.sizes(3) == []


def test_a_node_reports_the_rank_that_failed_first_and_not_one_that_nccl_has_aborted():
    ranks = elastic.Ranks(3, ["-c", "import os, sys; sys.exit((3, 134, 7)[int(os.environ['RANK'])])"], None)
    ranks.start(Record("a", "a1", members={"a": "a1"}), ("127.0.0.1", 1))
    deadline = time.monotonic() + HANG_SECONDS
    while ranks.code() != 7:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nodes_that_differ_end_the_job_before_its_first_start(make_nodes):
    nodes = make_nodes(2, "--check=1")
    nodes.agents[1].kill()
    nodes.agents[1].join()
    nodes.rank_words = ["other"]
    nodes.agents[1] = nodes.start(1)
    assert nodes.codes() == [2, 2]
    assert nodes.sizes(1) == []


def test_ranks_that_fail_again_end_the_job_with_their_code(make_nodes):
    nodes = make_nodes(2, "--max_restarts=1")
    (nodes.folder / "end-rank-0").write_text("7")
    assert nodes.codes() == [7, 7]
    assert nodes.sizes(3) == []


def test_a_signal_to_one_agent_lets_all_ranks_of_its_node_end(make_nodes):
    nodes = make_nodes(1)
    nodes.wait_for(1, 1)
    nodes.agents[0].terminate()
    assert nodes.codes() == [128 + signal.SIGTERM]
