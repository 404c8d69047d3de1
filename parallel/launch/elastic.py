"""Train on as many nodes of a list as there are: after the loss of any node, the others go on without a hand.

    python -m parallel.launch.elastic --nodes node0,node1,node2 --num_ranks 8 -- SCRIPT ARGUMENTS

Started on every node of the list; `scripts/launch/torchrun.sh` does so if MIN_NODES is set. Each agent starts the ranks
of its node, and publishes and reads what parallel/launch/membership.py tells. Exit codes are those of the ranks: what a
user has to correct (2) ends the job, other failures restart it.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import torch.distributed as dist

from parallel import watchdog
from parallel.errors import ConfigError, exit_on_config_error
from parallel.launch.membership import (
    Limits,
    Peers,
    Record,
    can_grow,
    end_of_job,
    is_broken,
    next_start,
    start_to_join,
)
from parallel.launch.node_facts import MARK_SECONDS, Job, NodeFacts, find_facts, find_problems, marked
from parallel.launch.preflight import DescribeJob, arguments_only, split_words
from parallel.launch.route import find_route, resolve
from parallel.launch.signals import take_warnings
from parallel.world import EXIT_USER_ERROR, LAUNCH_VARIABLE

POLL_SECONDS = 0.25
JOIN_SECONDS = 30.0  # in which a member must begin a start that the leader has published
END_SECONDS = 10.0  # for which an ended agent tells the others, at most
STOP_SECONDS = 600.0  # for ranks that were asked to stop, for their last checkpoint

# (the program's arguments, nodes, ranks of a node) -> why the program cannot run on so many; None if it can
FindProblem = Callable[[Sequence[str], int, int], str | None]


class Ranks:
    """The ranks of this node in one start, each in a process group of its own, with a log in the folder `logs`."""

    def __init__(
        self, start: Record, num_ranks: int, store: tuple[str, int], words: Sequence[str], logs: Path | None = None
    ):
        place, world_size = list(start.members).index(start.node), num_ranks * len(start.members)
        self._processes, self._logs = [], list[subprocess.Popen[bytes]]()
        for local_rank in range(num_ranks):
            variables = {
                "RANK": place * num_ranks + local_rank,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": num_ranks,
                "MASTER_ADDR": store[0],
                "MASTER_PORT": store[1],
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": start.start,  # torch's prefix in the store, which outlives a start
                "TORCHELASTIC_RUN_ID": start.launch,
                LAUNCH_VARIABLE: f"{start.launch} {start.start}",
            }
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            output = None
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                copy = ["tee", "-a", str(logs / f"rank_{variables['RANK']}.log")]
                log = subprocess.Popen(copy, stdin=subprocess.PIPE, start_new_session=True)
                output = log.stdin
                self._logs.append(log)
            command = [sys.executable, *words]
            self._processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            )
            if output is not None:
                output.close()  # only the rank holds it: the log ends with the rank

    def code(self) -> int | None:
        """Return None while the ranks run, 0 after all have ended well, else the exit code of one that has failed."""
        codes = [process.poll() for process in self._processes]
        failed = [code if code > 0 else 128 - code for code in codes if code]
        # The reason before its consequences: a rank that has lost another one says so by the watchdog's code.
        if failed:
            return min(failed, key=lambda code: (code != EXIT_USER_ERROR, code == watchdog.EXIT_CODE))
        return None if None in codes else 0

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the ranks; SIGKILL to the processes that they have started, too."""
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)

    def kill(self) -> None:
        """Kill the ranks and wait for their ends: the next ones need their memory and their ports."""
        self.send(signal.SIGKILL)
        for process in (*self._processes, *self._logs):
            process.wait()


class Agent:
    """The agent of one node. `run` returns the job's exit code."""

    def __init__(self, options: argparse.Namespace, words: Sequence[str], limits: Limits, facts: NodeFacts):
        self._options, self._words, self._limits, self._own_facts = options, words, limits, facts
        addresses = {name: resolve(_with_port(name, options.port)) for name in options.nodes.split(",")}
        self._nodes = list(addresses)
        own = Record(options.node, uuid4().hex[:8])
        # Of each node, after its agent's port: the store of the ranks of the starts that the node leads.
        self._stores = {name: (host, port + 1) for name, (host, port) in addresses.items()}
        try:
            self._peers = Peers(own, addresses, vars(facts))
            self._store = dist.TCPStore(
                *self._stores[own.node], is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STOP_SECONDS)
            )
        except (OSError, RuntimeError) as error:
            port = addresses[own.node][1]
            raise ConfigError(f"{own.node}: port {port} or {port + 1} cannot be served: {error}") from error
        self._ranks: Ranks | None = None
        self._since = time.monotonic()  # the last change of the state
        self._said = ""
        self._signals: list[int] = []
        self._warnings: list[int] = []  # signals of a scheduler, after which ranks save and end, and the job ends well
        self._num_passed_on = 0  # of the signals, to the ranks

    def run(self) -> int:
        # Signals are passed on later, because one may come while ranks are being started.
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _frame: self._signals.append(number))
        take_warnings(lambda number, _frame: self._warnings.append(number))
        while self._own.state != "ended":
            if self._own.state == "waiting":
                self._wait()
            else:
                self._watch()
            time.sleep(POLL_SECONDS)
        self._tell_end()
        return self._own.code or (128 + self._signals[-1] if self._signals else 0)

    @property
    def _own(self) -> Record:
        return self._peers.own

    def _become(self, **changes: Any) -> None:
        self._peers.own = replace(self._own, **changes)
        self._since = time.monotonic()

    def _seconds(self) -> float:
        return time.monotonic() - self._since

    def _wait(self) -> None:
        """Join the start that another node leads, lead the next one, or end with the job."""
        found = self._peers.read(self._nodes)
        if self._signals:
            self._become(state="ended")
        elif ended := end_of_job(self._own, found):
            self._become(state="ended", code=ended.code)
        elif joined := start_to_join(self._own, found):
            self._start(replace(joined, node=self._own.node, incarnation=self._own.incarnation))
        else:
            start = next_start(self._own, found, self._limits, self._seconds() < self._options.wait)
            if isinstance(start, Record):
                self._lead(start)
            elif self._seconds() > self._options.wait and "still run" not in start and "leads" not in start:
                self._say(f"{start}; no other node has come within {self._options.wait:g} s")
                self._become(state="ended", code=watchdog.EXIT_CODE)
            else:
                self._say(start)

    def _lead(self, start: Record) -> None:
        """Publish a start, unless it would restart too often, or a node differs."""
        if start.num_restarts > self._limits.max_restarts:
            self._say(f"the ranks have failed again after {self._limits.max_restarts} restarts")
            code = self._own.code or watchdog.EXIT_CODE
            self._become(start=start.start, members=start.members, state="ended", code=code)
            return
        try:
            until = time.monotonic() + (MARK_SECONDS if self._options.check else 0)
            nodes = [node for node in start.members if node != self._own.node]
            with marked(Path(self._own_facts.disk)) as mark:
                others = [NodeFacts(**self._peers.facts(node, mark, until)) for node in nodes]
        except (OSError, HTTPException):
            return  # the node has just been lost: the records are read again
        if problems := find_problems([self._own_facts, *others]) if self._options.check else []:
            self._say("preflight: " + "\n  ".join(problems))
            if start.start == 1:
                self._become(start=1, members=start.members, state="ended", code=EXIT_USER_ERROR)
                return
            # The job goes on with the nodes that it has had.
            if new := [node for node in start.members if node not in self._own.members]:
                left_out = dict.fromkeys(new, self._limits.max_failures_of_node)
                self._peers.own = replace(self._own, failures=self._own.failures | left_out)
                return
        lost = [node for node in self._own.members if node not in start.members]
        self._say(
            f"start {start.start} on {', '.join(start.members)}" + (f", without {', '.join(lost)}" if lost else "")
        )
        self._start(start)

    def _start(self, start: Record) -> None:
        store = self._stores[next(iter(start.members))]
        logs = None if self._options.logs == "none" else Path(self._options.logs)
        self._ranks = Ranks(start, self._options.num_ranks, store, self._words, logs)
        self._peers.own = replace(start, state="running", code=None)
        self._since = time.monotonic()

    def _watch(self) -> None:
        """Follow the ranks of this node and the records of the others."""
        assert self._ranks is not None
        self._pass_on_signals()
        # Read first: the ranks of other nodes end a moment after the failure that ends these.
        code = self._ranks.code()
        found = self._peers.read(self._nodes if self._own.leads else list(self._own.members)[:1])
        ended = [record for record in found.values() if record and record.state == "ended"]
        codes = [record.code for record in ended if self._own.has_member(record) and record.code]
        if codes or code == EXIT_USER_ERROR:
            self._ranks.kill()
            self._become(state="ended", code=next(iter(codes), code))
        elif code:
            self._stop(f"ranks have failed here with exit code {code}", code)
        elif is_broken(self._own, found, self._seconds() < JOIN_SECONDS):
            self._stop("another node was lost, or its ranks have failed", None)
        elif code == 0:
            self._finish(found)
        else:
            self._regroup(found)

    def _stop(self, reason: str, code: int | None) -> None:
        assert self._ranks is not None
        self._say(f"start {self._own.start} ends: {reason}")
        self._ranks.kill()
        self._become(state="waiting", code=code)

    def _finish(self, found: dict[str, Record | None]) -> None:
        """Wait for the ranks of the other nodes; the leader then ends the job, or it goes on to the next start."""
        members = [record for node, record in found.items() if record and node in self._own.members]
        if any(record.state == "regrouping" for record in members) and not self._signals:
            if not self._own.leads or all(r.state != "running" for r in members):
                self._become(state="waiting")
        elif self._own.state == "running":
            self._become(state="done")
        elif self._own.leads:
            if all(record.state in ("done", "ended") for record in members):
                self._become(state="ended", code=0)
        elif any(record.leads and record.state == "ended" for record in members):
            self._become(state="ended", code=0)

    def _regroup(self, found: dict[str, Record | None]) -> None:
        """Ask the ranks to save and to end if nodes can be added; they go on from there in the next start."""
        assert self._ranks is not None
        if self._own.state != "running" or self._seconds() < self._options.grow_after:
            return
        leader = found[next(iter(self._own.members))]
        if self._own.leads and can_grow(self._own, found, self._limits):
            self._say(f"start {self._own.start} is stopped, to add nodes")
        elif leader is None or leader.state != "regrouping":
            return
        self._become(state="regrouping")
        self._ranks.send(signal.SIGTERM)

    def _pass_on_signals(self) -> None:
        """Pass the first signal on to the ranks, which save and end; kill them after the second."""
        assert self._ranks is not None
        while self._warnings:
            self._ranks.send(signal.Signals(self._warnings.pop()))
        while self._num_passed_on < len(self._signals):
            self._ranks.send(signal.SIGKILL if self._num_passed_on else signal.SIGTERM)
            self._num_passed_on += 1

    def _tell_end(self) -> None:
        """Serve the record until all other nodes have ended too, or the time is over."""
        while self._seconds() < END_SECONDS:
            if all(record is None or record.state == "ended" for record in self._peers.read(self._nodes).values()):
                return
            time.sleep(POLL_SECONDS)

    def _say(self, line: str) -> None:
        if line != self._said:
            sys.stderr.write(f"launch: {self._own.node}: {line}\n")
            sys.stderr.flush()
        self._said = line


def _with_port(node: str, port: int) -> str:
    return node if ":" in node else f"{node}:{port}"


def main(
    words: Sequence[str],
    describe_job: DescribeJob = arguments_only,
    find_problem: FindProblem = lambda arguments, num_nodes, num_ranks: None,
) -> NoReturn:
    """Run the agent of this node. `words` are its options, and after `--` the program and its arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m parallel.launch.elastic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", required=True, help="HOST or HOST:PORT of each node, separated by commas")
    parser.add_argument("--node", help="this node's entry in the list; found by its address if it is not given")
    parser.add_argument("--port", type=int, default=29500, help="of the agents; the next one is that of a store")
    parser.add_argument("--num_ranks", type=int, default=1, help="ranks of a node")
    parser.add_argument("--min_nodes", type=int, default=1, help="with fewer, the job waits")
    parser.add_argument("--max_restarts", type=int, default=3, help="after failures of ranks; losses do not count")
    parser.add_argument("--max_failures", type=int, default=3, help="of a node, after which it is left out")
    parser.add_argument("--check", type=int, default=1, choices=(0, 1), help="0: the nodes are not compared")
    parser.add_argument("--grow_after", type=float, default=60.0, help="seconds of a start before nodes are added")
    parser.add_argument("--wait", type=float, default=120.0, help="seconds to wait for nodes")
    parser.add_argument("--logs", help="folder of the ranks' logs, `none` for no logs; logs in the job's folder")
    own, program = split_words(words)
    options = parser.parse_args(own)
    arguments = program[1:]
    names = options.nodes.split(",")
    options.node = options.node or next((n for n in names if find_route(_with_port(n, options.port)).is_host), None)
    if options.node not in names:
        raise ConfigError(f"this node is none of --nodes {options.nodes}; name it with --node")
    if not 1 <= options.min_nodes <= len(names):
        raise ConfigError(f"--min_nodes {options.min_nodes} is not in 1 to {len(names)}, the number of --nodes")
    job: Job = describe_job(arguments, len(names) * options.num_ranks)
    options.logs = options.logs or ("none" if job.folder == Path() else str(job.folder / "logs"))
    # Asked for whenever nodes come or go; the answer takes a moment.
    problem_on = cache(lambda num_nodes: find_problem(arguments, num_nodes, options.num_ranks))
    limits = Limits(
        options.min_nodes, options.max_restarts, options.max_failures, lambda num_nodes: problem_on(num_nodes) is None
    )
    if not any(map(limits.fits, range(options.min_nodes, len(names) + 1))):
        raise ConfigError(problem_on(len(names)))
    sys.exit(Agent(options, program, limits, replace(find_facts(job), name=options.node)).run())


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
