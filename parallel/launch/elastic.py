"""Train on as many nodes of a list as there are: after the loss of any node, the others go on without a hand.

    python -m gpt.elastic --nodes node0,node1,node2 --num_ranks 8 -- pretrain_gpt.py ARGUMENTS

Started on every node of the list; `scripts/launch/torchrun.sh` does so if MIN_NODES is set. Each agent starts the ranks
of its node, and publishes and reads what parallel/launch/membership.py tells. Exit codes are those of the ranks: what a
user has to correct (2) ends the job, other failures restart it.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import torch.distributed as dist

from parallel.ending import EXIT_LOST, EXIT_USER_ERROR
from parallel.launch.channel import read_secret
from parallel.launch.membership import (
    ABORTED,
    SILENT_SECONDS,
    Limits,
    Record,
    can_grow,
    end_of_job,
    is_broken,
    next_start,
    start_to_join,
    with_newer_start,
)
from parallel.launch.node_facts import NodeFacts, find_facts, find_problems
from parallel.launch.peers import Peers
from parallel.launch.preflight import DescribeJob, split_words
from parallel.launch.route import find_route, resolve
from parallel.process_defaults import raise_file_limit
from parallel.stopping import take_warnings
from parallel.validation.errors import ConfigError, first_line
from parallel.world import LAUNCH_VARIABLE, NOTES_VARIABLE, STEP_NOTE, UNFINISHED_NOTE

POLL_SECONDS = 0.25
NODES_PER_POLL = 128  # so many are asked in that time while all is well: the leader of more asks them less often
ARBITER_SECONDS = 20.0  # in which the arbiter must answer before the first start, or there is none in this launch
MINORITY_SECONDS = SILENT_SECONDS + 6.0  # after which less than half of the members ask it: the others come first
JOIN_SECONDS = 30.0  # in which a member must begin a start that the leader has published
END_SECONDS = 10.0  # for which an ended agent tells the others, at most
KILL_SECONDS = 60.0  # for killed ranks, which a driver or a file server may hold for ever
COPY_LOG = "trap '' INT TERM HUP USR1; exec tee -a \"$1\""  # a rank dies of its next line if this ends before it
STOP_SECONDS = 600.0  # for ranks that were asked to stop, for their last checkpoint

# (the program's arguments, nodes, ranks of a node) -> why the program cannot run on so many; None if it can
FindProblem = Callable[[Sequence[str], int, int], str | None]


class Ranks:
    """The ranks of this node in its present start, each in a process group of its own, with a log in `logs`."""

    def __init__(self, num_ranks: int, words: Sequence[str], logs: Path | None, notes: Path = Path(os.devnull)):
        self._num_ranks, self._command, self._logs = num_ranks, [sys.executable, *words], logs
        self._notes = notes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log_writers: list[subprocess.Popen[bytes]] = []
        self._are_asked = False

    def start(self, start: Record, store: tuple[str, int]) -> None:
        """Start the ranks, which meet in a store. Those of the start before have been killed."""
        self._processes, self._log_writers, self._are_asked = [], [], False
        first_rank = list(start.members).index(start.node) * self._num_ranks
        for local_rank in range(self._num_ranks):
            variables = {
                "RANK": first_rank + local_rank,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": self._num_ranks * len(start.members),
                "LOCAL_WORLD_SIZE": self._num_ranks,
                "MASTER_ADDR": store[0],
                "MASTER_PORT": store[1],
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": start.start,  # torch's prefix in the store, which outlives a start
                "TORCHELASTIC_RUN_ID": start.launch,
                LAUNCH_VARIABLE: f"{start.launch} {start.start}",
                NOTES_VARIABLE: self._notes,
            }
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            output = None
            if self._logs is not None:
                self._logs.mkdir(parents=True, exist_ok=True)
                copy = ["bash", "-c", COPY_LOG, "tee", str(self._logs / f"rank_{variables['RANK']}.log")]
                self._log_writers.append(subprocess.Popen(copy, stdin=subprocess.PIPE, start_new_session=True))
                output = self._log_writers[-1].stdin
            self._processes.append(
                subprocess.Popen(self._command, env=environment, stdout=output, stderr=output, start_new_session=True)
            )
            if output is not None:
                output.close()  # only the rank holds it: the log ends with the rank
        self._are_asked = False  # a signal that has come meanwhile has missed some: the caller sends it again

    def code(self) -> int | None:
        """Return None while the ranks run, 0 after all have ended well, else the exit code of one that has failed."""
        codes = [process.poll() for process in self._processes]
        failed = [code if code > 0 else 128 - code for code in codes if code]
        # The reason before its consequences: a rank that has lost another one says so by the watchdog's code, or is
        # aborted by that of NCCL.
        if failed:
            return min(failed, key=lambda code: (code != EXIT_USER_ERROR, code == EXIT_LOST, code == ABORTED))
        return None if None in codes else 0

    def send(self, number: int) -> None:
        """Send a signal to the ranks; SIGKILL to the processes that they have started, too. May be called in a handler.

        Of those that ask them to stop only the first is sent: at a second one, later, a rank ends without saving.
        """
        if number != signal.SIGKILL:
            if self._are_asked:
                return
            self._are_asked = True
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)

    def kill(self) -> None:
        """Kill the ranks and wait for their ends: the next ones need their memory and their ports.

        Raises TimeoutExpired if they do not end. What another process still writes to a log then is lost.
        """
        self.send(signal.SIGKILL)
        until = time.monotonic() + KILL_SECONDS
        for process in self._processes:
            process.wait(max(0.0, until - time.monotonic()))
        for writer in self._log_writers:
            try:
                writer.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                writer.kill()


class Signals:
    """The signals of this agent, which are passed on at once: the ranks may have received them too, and count them.

    Of SIGTERM, SIGINT and SIGHUP the first lets the ranks save and end, and the second kills them, unless it is SIGHUP,
    of which a terminal that is closed sends two. After a scheduler's warnings they save and end too, and the job ends
    well. None of these signals is followed by another start.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.received: list[int] = []
        self.was_warned = False
        self._ranks = ranks
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._receive)
        take_warnings(self._warn)

    def ask_to_end(self) -> bool:
        return self.was_warned or bool(self.received)

    def _warn(self, number: int) -> None:
        self.was_warned = True
        self._ranks.send(number)

    def _receive(self, number: int, _frame: object) -> None:
        self._ranks.send(signal.SIGKILL if self.received and number != signal.SIGHUP else signal.SIGTERM)
        self.received.append(number)


class Agent:
    """The agent of one node. `run` returns the job's exit code."""

    def __init__(
        self, options: argparse.Namespace, words: Sequence[str], limits: Limits, folder: Path, facts: NodeFacts
    ):
        self._options, self._limits, self._facts = options, limits, facts
        addresses = {name: resolve(_with_port(name, options.port)) for name in options.nodes}
        port = addresses[options.node][1]
        # Served at the address by which the others reach this node: its name may stand for 127.0.1.1 here.
        addresses[options.node] = find_route(_with_port(options.node, options.port)).local_address, port
        # Of each node, after its agent's port: the store of the ranks of the starts that the node leads.
        self._stores = {name: (host, port + 1) for name, (host, port) in addresses.items()}
        try:
            self._peers = Peers(Record(options.node, uuid4().hex[:8]), addresses, read_secret(folder), facts)
            # Torch's own store listens at all addresses.
            listener = socket.create_server(self._stores[options.node], backlog=1024)
            self._store = dist.TCPStore(
                *self._stores[options.node],
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=STOP_SECONDS),
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"{options.node}: port {port} or {port + 1} cannot be served: {error}") from error
        self._notes = Path(os.environ.get(NOTES_VARIABLE) or tempfile.mkdtemp(prefix="launch-"))
        self._arbiter = resolve(options.arbiter) if options.arbiter else None
        self._ranks = Ranks(options.num_ranks, words, options.logs, self._notes)
        self._signals = Signals(self._ranks)
        self._said = ""

    def run(self) -> int:
        try:
            while self._own.state != "ended":
                if self._own.state == "waiting":
                    self._wait()
                else:
                    self._watch()
                num_asked = len(self._options.nodes) if self._own.leads else 1
                time.sleep(POLL_SECONDS * max(1.0, num_asked / NODES_PER_POLL))
        except subprocess.TimeoutExpired:
            # The record ends with this agent: the other nodes go on without this one, instead of waiting for it.
            self._say(f"the ranks have been killed and do not end within {KILL_SECONDS:g} s; this node is given up")
            return EXIT_LOST
        except BaseException:
            self._ranks.kill()  # they are in sessions of their own, and would go on without an agent
            raise
        # The record is served until the other nodes have read it, and have ended too.
        while self._peers.seconds() < END_SECONDS and any(
            record is not None and record.state != "ended" for record in self._peers.read(self._options.nodes).values()
        ):
            time.sleep(POLL_SECONDS)
        return self._own.code or (128 + self._signals.received[-1] if self._signals.received else 0)

    @property
    def _own(self) -> Record:
        return self._peers.own

    def _end(self, code: int | None, **changes: Any) -> None:
        # Published at once: a record in between would let another node lead the next start.
        self._peers.become(state="ended", code=code, **changes)

    def _wait(self) -> None:
        """Join the start that another node leads, lead the next one, or end with the job."""
        found, own = self._peers.read(self._options.nodes), self._own
        is_patient = self._peers.seconds() < self._options.wait
        if (known := with_newer_start(own, found)) is not own:
            self._peers.own = known  # not `become`: it has waited since
        elif self._signals.ask_to_end():
            (self._notes / UNFINISHED_NOTE).touch()
            self._end(own.code)
        elif ended := end_of_job(own, found):
            self._end(ended.code)
        elif joined := start_to_join(own, found):
            self._start(replace(joined, node=own.node, incarnation=own.incarnation))
        elif isinstance(start := next_start(own, found, self._limits, is_patient), Record):
            self._lead(start)
        elif is_patient or "still run" in start or "leads" in start:
            self._say("; ".join(filter(None, (start, self._peers.stranger))))
        else:
            self._say(f"{start}; no other node has come within {self._options.wait:g} s; {self._peers.stranger}")
            self._end(EXIT_USER_ERROR if self._peers.stranger else EXIT_LOST)

    def _lead(self, start: Record) -> None:
        """Publish a start, unless it would restart too often, or a node differs."""
        own = self._own
        if start.num_restarts > self._limits.max_restarts:
            self._say(f"the ranks have failed again after {self._limits.max_restarts} restarts")
            self._end(own.code or EXIT_LOST, start=start.start, members=start.members)
            return
        try:
            problems = self._compare(start)
        except (OSError, ValueError):
            return  # the node has just been lost: the records are read again
        if problems:
            self._say("preflight: " + "\n  ".join(problems))
            if start.start == 1:
                self._end(EXIT_USER_ERROR, start=1, members=start.members)
                return
            # The job goes on with the nodes that it has had.
            if new := [node for node in start.members if node not in own.members]:
                left_out = dict.fromkeys(new, self._limits.max_failures_of_node)
                self._peers.own = replace(own, failures=own.failures | left_out)
                return
        if (granted := self._granted(start)) is None:
            return
        lost = [node for node in own.members if node not in start.members]
        without = f", without {', '.join(lost)}" if lost else ""
        self._say(f"start {start.start} on {', '.join(start.members)}{without}")
        self._start(granted)

    def _granted(self, start: Record) -> Record | None:
        """Return a start that this node may lead, or None if the arbiter does not grant it now."""
        own, seconds, patience = self._own, self._peers.seconds(), self._options.wait
        if self._arbiter is None or not (start.has_arbiter or start.start == 1):
            return start
        if 2 * sum(node in own.members for node in start.members) < len(own.members) and seconds < MINORITY_SECONDS:
            self._say("less than half of the nodes are left here: the others may go on")
            return None
        try:
            if self._peers.is_granted(self._arbiter, start.start):
                return replace(start, has_arbiter=True)
            self._say("other nodes have gone on with the job; these wait for them")
        except (OSError, ValueError) as error:
            self._say(f"the arbiter, {self._options.arbiter}, does not answer: {first_line(error)}")
            if start.start == 1:  # without it the majority goes on
                return start if seconds >= ARBITER_SECONDS else None
            patience = SILENT_SECONDS
        if seconds >= patience:
            self._end(EXIT_LOST)
        return None

    def _compare(self, start: Record) -> list[str]:
        """Return in what the nodes of a start differ. Raises OSError or ValueError if one cannot be reached."""
        others = [self._peers.facts(node) for node in start.members if node != start.node]
        return find_problems([self._facts, *others]) if self._options.check else []

    def _start(self, start: Record) -> None:
        if self._signals.ask_to_end():  # since the records were read
            self._end(self._own.code)
            return
        self._ranks.start(start, self._stores[start.leader])
        self._peers.become(**vars(start) | {"state": "running", "code": None})
        if self._signals.ask_to_end():
            self._ranks.send(signal.SIGTERM)  # the signal may have come before these ranks

    def _watch(self) -> None:
        """Follow the ranks of this node and the records of the others."""
        # Read first: the ranks of other nodes end a moment after the failure that ends these.
        code, own = self._ranks.code(), self._own
        found = self._peers.read(self._options.nodes if own.leads else [own.leader])
        members = [record for record in found.values() if record and own.has_member(record)]
        codes = [record.code for record in members if record.state == "ended" and record.code]
        if codes or code == EXIT_USER_ERROR:
            self._ranks.kill()
            self._end(next(iter(codes), code))
        elif code:
            self._stop(f"ranks have failed here with exit code {code}", code)
        elif is_broken(own, found, self._peers.seconds() < JOIN_SECONDS, self._peers.seconds() < STOP_SECONDS):
            self._stop("another node was lost, or its ranks have failed", None)
        elif code == 0:
            self._finish(members)
        elif own.state == "running" and self._peers.seconds() >= self._options.grow_after:
            self._regroup(found)

    def _stop(self, reason: str, code: int | None) -> None:
        self._say(f"start {self._own.start} ends: {reason}")
        self._ranks.kill()
        step = self._own.step
        with suppress(OSError, ValueError):  # only the node of the first rank has the note
            step = max(step, int((self._notes / STEP_NOTE).read_text()))
        self._peers.become(state="waiting", code=0 if self._own.state == "regrouping" else code, step=step)

    def _finish(self, members: Sequence[Record]) -> None:
        """Wait for the ranks of the other nodes; the leader then ends the job, or it goes on to the next start."""
        own, states = self._own, {record.state for record in members}
        if own.state == "regrouping" or ("regrouping" in states and not self._signals.received):
            if not own.leads or "running" not in states:
                self._peers.become(state="waiting", code=0)
        elif own.state == "running":
            self._peers.become(state="done")
        elif states <= {"done", "ended"} if own.leads else states == {"ended"}:
            self._end(0)

    def _regroup(self, found: dict[str, Record | None]) -> None:
        """Ask the ranks to save and to end if nodes can be added; they go on from there in the next start."""
        leader = found[self._own.leader]
        if self._own.leads and can_grow(self._own, found, self._limits):
            self._say(f"start {self._own.start} is stopped, to add nodes")
        elif leader is None or leader.state != "regrouping":
            return
        self._peers.become(state="regrouping")
        self._ranks.send(signal.SIGTERM)

    def _say(self, line: str) -> None:
        if line != self._said:
            with suppress(OSError):  # such as of a terminal that was closed
                sys.stderr.write(f"launch: {self._own.node}: {line}\n")
                sys.stderr.flush()
        self._said = line


def _with_port(node: str, port: int) -> str:
    return node if ":" in node else f"{node}:{port}"


def main(words: Sequence[str], describe_job: DescribeJob, find_problem: FindProblem) -> NoReturn:
    """Run the agent of this node. `words` are its options, and after `--` the program and its arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m gpt.elastic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    parser.add_argument("--arbiter", help="ADDRESS:PORT of a process outside of the nodes, which grants each start")
    parser.add_argument("--no_arbiter", type=int, default=0, choices=(0, 1), help="1: half of the nodes may go on")
    parser.add_argument("--logs", help="folder of the ranks' logs, `none` for no logs; logs in the job's folder")
    own, program = split_words(words)
    options = parser.parse_args(own)
    arguments, names = program[1:], options.nodes.split(",")
    options.nodes, options.arbiter = names, None if options.no_arbiter else options.arbiter
    options.node = options.node or next((n for n in names if find_route(_with_port(n, options.port)).is_host), None)
    if options.node not in names:
        raise ConfigError(f"this node is none of --nodes {','.join(names)}; name it with --node")
    if not 1 <= options.min_nodes <= len(names):
        raise ConfigError(f"--min_nodes {options.min_nodes} is not in 1 to {len(names)}, the number of --nodes")
    job = describe_job(arguments, len(names) * options.num_ranks)
    logs = options.logs or ("none" if job.folder == Path() else job.folder / "logs")
    options.logs = None if logs == "none" else Path(logs)
    # Asked for whenever nodes come or go; the answer takes a moment.
    problem_on = cache(lambda num_nodes: find_problem(arguments, num_nodes, options.num_ranks))
    limits = Limits(
        min_nodes=options.min_nodes,
        max_restarts=options.max_restarts,
        max_failures_of_node=options.max_failures,
        fits=lambda num_nodes: problem_on(num_nodes) is None,
        needs_majority=not options.no_arbiter,
    )
    if not any(map(limits.fits, range(options.min_nodes, len(names) + 1))):
        raise ConfigError(problem_on(len(names)))
    raise_file_limit()  # the leader serves the store of all ranks
    sys.exit(Agent(options, program, limits, job.folder, replace(find_facts(job), name=options.node)).run())
