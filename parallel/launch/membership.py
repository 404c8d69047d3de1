"""Membership of nodes in a job: each publishes one record, reads those of the others, and writes to none of them.

    waiting ----> running ----> done ----> ended        an agent's state; `running` and `done` belong to one start
       ^             |           |
       +-------------+-----------+                      another node was lost, its ranks failed, or a node can be added

A *start* of the job has a number and a leader, the first of its nodes. The leader reads the records of all nodes, the
others read the leader's. As soon as the records do not fit together any more, every node stops its ranks and waits. If
all nodes that can be reached wait, the first of them in the list publishes the next start. So no store and no node has
to outlive the others.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import quote, unquote

from parallel.ending import EXIT_LOST
from parallel.launch.node_facts import MARK_POLL_SECONDS, seconds_ahead, sees

ABORTED = 128 + signal.SIGABRT  # the exit code of a rank that torch's watchdog of NCCL has ended
FACTS = "/facts?"
REPLY_SECONDS = 2.0  # for which a reply is awaited
SILENT_SECONDS = 6.0  # after which a node that does not answer is lost; one that refuses connections is lost at once

State = Literal["waiting", "running", "regrouping", "done", "ended"]


@dataclass(frozen=True)
class Record:
    """The record that an agent publishes.

    `incarnation` differs after a restart of the agent. `start` and `members` ({node: incarnation}, in the order of
    their ranks) are those of the newest start in which it took part. `code`: the exit code of its ranks in that start,
    if they have failed, 0 if they were asked to end in a regroup, or the job's if it has ended. `failures`: by node,
    the starts that it has broken.
    """

    node: str
    incarnation: str
    state: State = "waiting"
    start: int = 0
    members: dict[str, str] = field(default_factory=dict)
    launch: str = ""
    code: int | None = None
    num_restarts: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def leader(self) -> str:
        return next(iter(self.members), "")

    @property
    def leads(self) -> bool:
        return self.leader == self.node

    def has_member(self, other: "Record") -> bool:
        return self.members.get(other.node) == other.incarnation


Found = Mapping[str, Record | None]  # the records of nodes; None: the node cannot be reached


@dataclass(frozen=True)
class Limits:
    """Limits of a launch. `fits(n)`: the job can run on n nodes."""

    min_nodes: int
    max_restarts: int
    max_failures_of_node: int
    fits: Callable[[int], bool] = lambda num_nodes: True


def is_broken(own: Record, found: Found, may_still_join: bool, may_still_end: bool = False) -> bool:
    """Return True if the start in which this node takes part cannot go on. Reads only the leader unless it leads.

    In a regroup nodes wait as soon as their ranks have ended: while `may_still_end`, this breaks no start.
    """

    def waits(other: Record) -> bool:
        return other.state == "waiting" and not (own.state == "regrouping" and may_still_end)

    if not own.leads:
        leader = found[own.leader]
        return leader is None or not own.has_member(leader) or leader.start != own.start or waits(leader)
    others = [found[node] for node in own.members if node != own.node]
    return any(
        other is None
        or not own.has_member(other)
        or other.start > own.start
        or (waits(other) if other.start == own.start else not may_still_join)
        for other in others
    )


def start_to_join(own: Record, found: Found) -> Record | None:
    """Return the leader's record of the newest start of which this node is a member, if it has not taken part yet."""
    leaders = [record for record in _reached(found) if record.leads and record.state == "running"]
    mine = [record for record in leaders if record.has_member(own) and record.start > own.start]
    return max(mine, key=lambda record: record.start, default=None)


def end_of_job(own: Record, found: Found) -> Record | None:
    """Return the record of a leader that says that the job has ended, if no newer start runs."""
    newest = max(_reached(found), key=lambda record: (record.start, record.leads), default=None)
    return newest if newest and newest.leads and newest.state == "ended" else None


def next_start(own: Record, found: Found, limits: Limits, is_patient: bool) -> Record | str:
    """Return the record with which this node leads the next start of the job, or the reason why it must not yet.

    `found` has all nodes, this one included, in the order of the list. Before the first start `is_patient` waits for
    all of them.
    """
    everyone = _reached(found)
    if busy := [record.node for record in everyone if record.state not in ("waiting", "ended")]:
        return f"{', '.join(busy)} still run"
    last = max(everyone, key=lambda record: (record.start, sum(record.failures.values())))
    failures, num_restarts = _account(last, found)
    good = [r for r in everyone if r.state == "waiting" and not _is_left_out(failures, r.node, limits)]
    if not good or good[0].node != own.node:
        return f"{good[0].node} leads" if good else "all nodes have failed too often"
    if (absent := [node for node, record in found.items() if record is None]) and last.start == 0 and is_patient:
        return f"waiting for {', '.join(absent)}"
    counts = range(len(good), limits.min_nodes - 1, -1)
    num_nodes = next((number for number in counts if limits.fits(number)), None)
    if num_nodes is None:
        return f"{len(good)} of {len(found)} nodes are too few, or the settings do not fit to them"
    return replace(
        own,
        state="running",
        start=last.start + 1,
        members={record.node: record.incarnation for record in good[:num_nodes]},
        launch=last.launch or own.incarnation,
        code=None,
        num_restarts=num_restarts,
        failures=failures,
    )


def can_grow(own: Record, found: Found, limits: Limits) -> bool:
    """Return True if more nodes than those of the start that this node leads are there, and the job fits to them."""
    waiting = [record for record in _reached(found) if record.state == "waiting" and record.node not in own.members]
    num_spare = sum(not _is_left_out(own.failures, record.node, limits) for record in waiting)
    return any(limits.fits(len(own.members) + number) for number in range(1, num_spare + 1))


def _is_left_out(failures: Mapping[str, int], node: str, limits: Limits) -> bool:
    return failures.get(node, 0) >= limits.max_failures_of_node


def _account(last: Record, found: Found) -> tuple[dict[str, int], int]:
    """Return (failures by node, number of restarts) after the end of a start.

    The failures are those of the nodes that were lost, and of those whose ranks failed first: ranks that end because
    others were lost say so by their exit code. NCCL's watchdog aborts such ranks, and also a rank whose own GPU has
    failed: a node with that code is to blame only if there is no other reason, and no other such node. If no node was
    lost, the failure of ranks counts as a restart. In a regroup only lost nodes count: ranks that still start up are
    ended by the signal that asks them to.
    """
    lost, codes = [], {}
    for node in last.members:
        record = found.get(node)
        if record is None or not last.has_member(record):
            lost.append(node)
        elif record.start == last.start and record.code is not None:
            codes[node] = record.code
    if 0 in codes.values():
        codes = {}
    aborted = [node for node, code in codes.items() if code == ABORTED]
    at_fault = [*lost, *(node for node, code in codes.items() if code not in (ABORTED, EXIT_LOST))]
    failures = dict(last.failures)
    for node in at_fault or (aborted if len(aborted) == 1 else []):
        failures[node] = failures.get(node, 0) + 1
    return failures, last.num_restarts + bool(codes and not lost)


def _reached(found: Found) -> list[Record]:
    return [record for record in found.values() if record is not None]


class Peers:
    """The records of all nodes: publishes this node's own, and reads the others'. Raises OSError if the port is in use.

    `addresses`: (host, port) by node, in the order of the list. `facts` are served beside the record, for the leader.
    """

    def __init__(self, own: Record, addresses: Mapping[str, tuple[str, int]], facts: Any):
        self.own, self._addresses = own, addresses
        self._since = time.monotonic()  # the last change of the own state
        self._seen: dict[str, tuple[float, Record]] = {}
        self._pool = ThreadPoolExecutor(max_workers=min(32, len(addresses)))
        peers = self

        class Server(ThreadingHTTPServer):
            request_queue_size = 1024  # all nodes ask at once, several times a second

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.startswith(FACTS):
                    mark = unquote(self.path.removeprefix(FACTS))
                    answer = facts | {"clock_seconds": time.time(), "shares_folder": sees(mark, 0)}
                else:
                    answer = asdict(peers.own)
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Print nothing."""

        self._server = Server(("", addresses[own.node][1]), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def become(self, **changes: Any) -> None:
        """Publish another state of this node."""
        self.own = replace(self.own, **changes)
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Return for how long this node has been in its state."""
        return time.monotonic() - self._since

    def read(self, nodes: Sequence[str]) -> dict[str, Record | None]:
        """Return the records of some nodes, this one's own included if it is among them."""
        return dict(zip(nodes, self._pool.map(self._read, nodes), strict=True))

    def facts(self, node: str, mark: str, until: float) -> Any:
        """Return the facts of a node, which looks for the file `mark`, unless that is empty.

        If it does not see it, it is asked again up to this monotonic time. Raises OSError or HTTPException.
        """
        while True:
            asked = time.time()
            facts = self._get(node, f"{FACTS}{quote(mark)}")
            ahead = seconds_ahead(facts["clock_seconds"], asked, time.time())
            if facts["shares_folder"] or time.monotonic() >= until:
                return facts | {"clock_seconds": ahead}
            time.sleep(MARK_POLL_SECONDS)

    def _read(self, node: str) -> Record | None:
        if node == self.own.node:
            return self.own
        try:
            record = Record(**self._get(node, "/record"))
        except ConnectionRefusedError:
            self._seen.pop(node, None)
            return None
        except (OSError, HTTPException, ValueError, TypeError):
            since, last = self._seen.get(node, (-SILENT_SECONDS, None))
            return last if time.monotonic() - since < SILENT_SECONDS else None
        self._seen[node] = time.monotonic(), record
        return record

    def _get(self, node: str, path: str) -> Any:
        connection = HTTPConnection(*self._addresses[node], timeout=REPLY_SECONDS)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()
