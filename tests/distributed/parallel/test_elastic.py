"""Agents of nodes, on ports of this machine, whose ranks are small programs."""

import os
import re
import runpy
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lab.acceptance.child import descendants, kill_all
from parallel.ending import EXIT_LOST
from parallel.launch import elastic
from parallel.launch.channel import read_secret
from parallel.launch.membership import Record
from parallel.launch.node_facts import Job
from tests.programs import HANG_SECONDS, start_forked, wait_for_end, wait_until
from tests.source_files import ROOT

# Notes its start in a folder, and ends when a file tells it: with the code that stands there. If it is asked to end, it
# does so with 0, or by the signal if it still starts up.
RANK = """
import os, pathlib, signal, sys, time
folder, name = pathlib.Path(sys.argv[1]), os.environ["ZERO_START_OF_LAUNCH"].split()[1] + "-" + os.environ["RANK"]
if not (folder / f"starts-up-{name}").exists():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(folder / f"{name}.tmp").write_text(f"{os.environ['WORLD_SIZE']} {os.environ['MASTER_PORT']}")
(folder / f"{name}.tmp").rename(folder / name)
while True:
    for end in (folder / "end", folder / f"end-{name}", folder / f"end-rank-{os.environ['RANK']}"):
        if end.exists():
            sys.exit(int(end.read_text() or 0))
    time.sleep(0.02)
"""


def run_agent(words: list[str]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup
    folder = Path(words[-1 if words[-1] != "other" else -2])
    elastic.main(words, lambda arguments, _: Job(settings=tuple(arguments), folder=folder), lambda *_: None)


def run_arbiter(address: tuple[str, int], folder: Path) -> None:
    runpy.run_path(str(ROOT / "scripts" / "launch" / "arbiter.py"))["arbitrate"](address, read_secret(folder))


class Nodes:
    """Nodes of one rank each, and what their ranks have noted."""

    def __init__(self, folder: Path, num_nodes: int, *options: str, agent: Callable[[list[str]], None] = run_agent):
        self.folder, self.run_agent = folder, agent
        (folder / "rank.py").write_text(RANK)
        self.names = [f"127.0.0.1:{port}" for port in free_pairs_of_ports(num_nodes)]
        # Without comparison of the nodes: on a busy machine the rates of their disks differ.
        self._options = ["--nodes", ",".join(self.names), "--wait=120", "--check=0", "--logs=none", *options]
        self.rank_words: list[str] = []
        self.agents = {number: self.start(number) for number in range(num_nodes)}

    def start(self, number: int) -> BaseProcess:
        own = [*self._options, "--node", self.names[number], "--"]
        program = [str(self.folder / "rank.py"), str(self.folder), *self.rank_words]
        return start_forked(self.folder / f"agent-{number}.txt", self.run_agent, [*own, *program])

    def lose(self, number: int) -> None:
        """Kill the agent first, and then its ranks."""
        agent = self.agents[number]
        kill_all([agent.pid, *descendants(agent.pid)])
        agent.join()

    def sizes(self, start: int) -> list[str]:
        """Return the world size that each rank of a start has noted."""
        return [path.read_text().split()[0] for path in sorted(self.folder.glob(f"{start}-[0-9]"))]

    def wait_for(self, start: int, num_ranks: int) -> None:
        def has_started() -> bool:
            codes = {number: agent.exitcode for number, agent in self.agents.items()}
            ended = [number for number, code in codes.items() if code is not None and code >= 0]
            assert not ended, [(self.folder / f"agent-{number}.txt").read_text() for number in ended]
            return self.sizes(start) == [str(num_ranks)] * num_ranks

        wait_until(has_started)

    def codes(self) -> list[int | None]:
        return [wait_for_end(agent) for agent in self.agents.values()]


def free_pairs_of_ports(number: int) -> list[int]:
    """Return ports below those that the system gives out, which are free like the ports after them.

    A process chooses from a range of its own: another one would find them free until the nodes have opened them.
    """
    found: list[int] = []
    first = 20000 + os.getpid() % 100 * 120
    for port in range(first, first + 120, 2):
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

        def make(num_nodes: int, *options: str, **settings: Any) -> Nodes:
            made.append(Nodes(Path(folder), num_nodes, *options, **settings))
            return made[-1]

        yield make
        for nodes in made:
            for agent in nodes.agents.values():
                if agent.is_alive():
                    kill_all([*descendants(agent.pid), agent.pid])


@pytest.mark.parametrize("starts_up", ["", "0", "1"], ids=["", "the leader's rank", "the other rank"])
def test_the_loss_of_the_leader_costs_a_start_and_its_return_adds_it_again(make_nodes, starts_up):
    nodes = make_nodes(3, "--grow_after=0", "--max_restarts=0")
    nodes.wait_for(1, 3)
    if starts_up:
        (nodes.folder / f"starts-up-2-{starts_up}").touch()
    nodes.lose(0)
    nodes.wait_for(2, 2)
    nodes.agents[0] = nodes.start(0)
    nodes.wait_for(3, 3)
    (nodes.folder / "end").touch()
    assert nodes.codes() == [0, 0, 0]


def test_a_node_of_two_goes_on_if_the_arbiter_grants_it_and_not_by_itself(make_nodes):
    port = free_pairs_of_ports(3)[-1]
    nodes = make_nodes(2, f"--arbiter=127.0.0.1:{port}")
    folder = nodes.folder
    grants = start_forked(folder / "arbiter.txt", run_arbiter, ("127.0.0.1", port), folder)
    try:
        nodes.wait_for(1, 2)
        nodes.lose(1)
        nodes.wait_for(2, 1)
        assert "grants start 2 to" in (folder / "arbiter.txt").read_text()
    finally:
        grants.kill()
    (folder / "end").touch()
    nodes.agents.pop(1)
    assert nodes.codes() == [0]


def test_a_node_that_is_left_of_two_ends_with_a_line_if_there_is_no_arbiter(make_nodes):
    nodes = make_nodes(2, "--wait=2")
    nodes.agents[1].kill()
    nodes.agents.pop(1)
    assert nodes.codes() == [EXIT_LOST]
    said = (nodes.folder / "agent-0.txt").read_text()
    assert "1 of 2 nodes are no majority" in said
    assert nodes.sizes(1) == []


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
    wait_until(lambda: ranks.code() == 7)


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


HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture
def signals_to(tmp_path: Path) -> Iterator[tuple[elastic.Ranks, Path]]:
    """Ranks that get this process's signals, and write those that they have received to a file each."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in HANDLED}
    (tmp_path / "rank.py").write_text(NOTING)
    ranks = elastic.Ranks(2, [str(tmp_path / "rank.py"), str(tmp_path)], None)
    elastic.Signals(ranks)
    try:
        yield ranks, tmp_path
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        for number, handler in before.items():
            signal.signal(number, handler)
        ranks.kill()


NOTING = """
import os, pathlib, signal, sys, time
note = pathlib.Path(sys.argv[1], os.environ["RANK"]).open("a", buffering=1)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: print(number, file=note))
print("ready", file=note)
while True:
    time.sleep(1)
"""


def wait_for_notes(folder: Path, *notes: str) -> None:
    def noted(rank: str) -> list[str]:
        return (folder / rank).read_text().split() if (folder / rank).exists() else []

    wait_until(lambda: [noted(rank) for rank in "01"] == [[*notes]] * 2)


def test_signals_reach_the_ranks_in_the_handler_and_only_one_asks_them_to_stop(signals_to):
    ranks, folder = signals_to
    ranks.start(Record("a", "a1", members={"a": "a1"}), ("127.0.0.1", 1))
    wait_for_notes(folder, "ready")
    with (
        mock.patch.object(ranks, "send", wraps=ranks.send) as send,
        mock.patch.object(os, "kill", wraps=os.kill) as kill,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_notes(folder, "ready", str(int(signal.SIGTERM)))
        ranks.send(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
    sent = [call.args[0] for call in send.call_args_list]
    assert sent == [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL]
    assert [call.args[1] for call in kill.call_args_list if call.args[0] != os.getpid()] == [signal.SIGTERM] * 2
    wait_until(lambda: ranks.code() == 128 + signal.SIGKILL)
    wait_for_notes(folder, "ready", str(int(signal.SIGTERM)))


def test_what_writes_a_log_outlives_signals_to_all_processes_of_a_job(tmp_path):
    """A rank would die of its next line."""
    (tmp_path / "rank.py").write_text(NOTING)
    ranks = elastic.Ranks(1, [str(tmp_path / "rank.py"), str(tmp_path)], tmp_path / "logs")
    ranks.start(Record("a", "a1", members={"a": "a1"}), ("127.0.0.1", 1))
    try:
        found: list[str] = []

        def ignored() -> bool:
            found[:] = [
                re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{each}/status").read_text())[0]
                for each in descendants(os.getpid())
                if Path(f"/proc/{each}/comm").read_text() == "tee\n"
            ]
            return len(found) == 1

        wait_until(ignored)
        assert [bool(int(found[0], 16) >> number - 1 & 1) for number in HANDLED] == [True] * 4
    finally:
        ranks.kill()


def test_a_signal_that_comes_while_ranks_are_started_can_be_sent_to_those_that_have_missed_it(signals_to):
    ranks, _ = signals_to
    popen = elastic.subprocess.Popen

    def start_one(_words: Any, **settings: Any) -> Any:
        started.append(popen(["sleep", str(HANG_SECONDS)], **settings))  # no rank, which may take the signal itself
        if len(started) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    started: list[Any] = []
    with mock.patch.object(elastic.subprocess, "Popen", start_one):
        ranks.start(Record("a", "a1", members={"a": "a1"}), ("127.0.0.1", 1))
    ranks.send(signal.SIGTERM)  # as the agent does
    assert [process.wait(HANG_SECONDS) for process in started] == [-signal.SIGTERM] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_one_agent_lets_all_ranks_of_its_node_end(make_nodes, number):
    nodes = make_nodes(1)
    nodes.wait_for(1, 1)
    os.kill(nodes.agents[0].pid, number)
    assert nodes.codes() == [128 + number]


def run_agent_that_fails(error: Path, words: list[str]) -> None:
    """Raise in the agent when a file is there."""
    with mock.patch.object(elastic, "is_broken", side_effect=lambda *_: error.exists() and 1 / 0):
        run_agent(words)


def run_agent_of_ranks_that_do_not_end(words: list[str]) -> None:
    nodes, node = (words[words.index(option) + 1] for option in ("--nodes", "--node"))
    held = subprocess.TimeoutExpired("a rank", 60) if nodes.endswith(node) else None
    with mock.patch.object(subprocess.Popen, "wait", side_effect=held) if held else nullcontext():
        run_agent(words)


def test_a_node_whose_ranks_do_not_end_when_they_are_killed_ends_and_the_others_go_on(make_nodes, tmp_path):
    nodes = make_nodes(2, f"--logs={tmp_path}", "--no_arbiter=1", agent=run_agent_of_ranks_that_do_not_end)
    nodes.wait_for(1, 2)
    (nodes.folder / "end-1-1").write_text("1")
    assert wait_for_end(nodes.agents.pop(1)) == EXIT_LOST
    nodes.wait_for(2, 1)
    (nodes.folder / "end").touch()
    assert nodes.codes() == [0]


def test_an_agent_that_fails_leaves_no_ranks(make_nodes, tmp_path):
    nodes = make_nodes(1, agent=partial(run_agent_that_fails, tmp_path / "error"))
    nodes.wait_for(1, 1)
    started = [Path(f"/proc/{process}") for process in descendants(nodes.agents[0].pid)]
    (tmp_path / "error").touch()
    assert nodes.codes() == [1]
    assert [process.exists() for process in started] == [False]
