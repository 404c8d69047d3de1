"""Membership of nodes in a job: each publishes one record, reads those of the others, and writes to none of them.

    waiting ----> running ----> done ----> ended        an agent's state; `running` and `done` belong to one start
       ^             |           |
       +-------------+-----------+                      another node was lost, its ranks failed, or a node can be added

A *start* of the job has a number and a leader, the first of its nodes. The leader reads the records of all nodes, the
others read the leader's. As soon as the records do not fit together any more, every node stops its ranks and waits. If
all nodes that can be reached wait, the first of them in the list publishes the next start. So no store and no node has
to outlive the others.

If the network parts the nodes, one part may go on: that with more than half of the members of the last start or, if the
launch has an arbiter, that which asks it first. A part of half the members or fewer has no other way.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from parallel.ending import EXIT_LOST
from parallel.validation.fields import NonNegative, Range

ABORTED = 128 + signal.SIGABRT  # the exit code of a rank that torch's watchdog of NCCL has ended
SILENT_SECONDS = 6.0  # after which a node that does not answer is lost; one that refuses connections is lost at once

State = Literal["waiting", "running", "regrouping", "done", "ended"]


@dataclass(frozen=True)
class Record:
    """The record that an agent publishes.

    `incarnation` differs after a restart of the agent. `start` and `members` ({node: incarnation}, in the order of
    their ranks) are those of the newest start in which it took part. `code`: the exit code of its ranks in that start,
    if they have failed, 0 if they were asked to end in a regroup, or the job's if it has ended. `failures`: by node,
    the starts that it has broken. `num_restarts` counts since step `counted_from`; `step`: the last one that was begun.
    `has_arbiter`: an arbiter grants the starts of this launch.
    """

    node: str
    incarnation: str
    state: State = "waiting"
    start: NonNegative = 0
    members: dict[str, str] = field(default_factory=dict)
    launch: str = ""
    code: Annotated[int, Range(0, 255)] | None = None
    num_restarts: NonNegative = 0
    counted_from: NonNegative = 0
    step: NonNegative = 0
    failures: dict[str, int] = field(default_factory=dict)
    has_arbiter: bool = False

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
    """Limits of a launch. `fits(n)`: the job can run on n nodes. `needs_majority`: or an arbiter that grants starts."""

    min_nodes: int
    max_restarts: int
    max_failures_of_node: int
    fits: Callable[[int], bool] = lambda num_nodes: True
    needs_majority: bool = True


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
    failures, restarts = _account(last, found)
    good = [r for r in everyone if r.state == "waiting" and not _is_left_out(failures, r.node, limits)]
    if not good or good[0].node != own.node:
        return f"{good[0].node} leads" if good else "all nodes have failed too often"
    if (absent := [node for node, record in found.items() if record is None]) and last.start == 0 and is_patient:
        return f"waiting for {', '.join(absent)}"
    # Those of the last start that are here cannot be in another start. Before the first one all of the list count.
    here = [record for record in everyone if not last.start or last.has_member(record)]
    if limits.needs_majority and not last.has_arbiter and 2 * len(here) <= (total := len(last.members or found)):
        return f"{len(here)} of {total} nodes are no majority: the others may go on; NO_ARBITER=1 goes on without them"
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
        failures=failures,
        has_arbiter=last.has_arbiter,
        **restarts,
    )


def can_grow(own: Record, found: Found, limits: Limits) -> bool:
    """Return True if more nodes than those of the start that this node leads are there, and the job fits to them."""
    waiting = [record for record in _reached(found) if record.state == "waiting" and record.node not in own.members]
    num_spare = sum(not _is_left_out(own.failures, record.node, limits) for record in waiting)
    return any(limits.fits(len(own.members) + number) for number in range(1, num_spare + 1))


def _is_left_out(failures: Mapping[str, int], node: str, limits: Limits) -> bool:
    return failures.get(node, 0) >= limits.max_failures_of_node


def with_newer_start(own: Record, found: Found) -> Record:
    """Return the record of a node that waits, with the newest start, which it must know to say who may go on."""
    newest = max(_reached(found), key=lambda record: record.start)
    if newest.start <= own.start or newest.has_member(own):
        return own
    return replace(newest, node=own.node, incarnation=own.incarnation, state=own.state, code=None)


def _account(last: Record, found: Found) -> tuple[dict[str, int], dict[str, Any]]:
    """Return (failures by node, the fields of a record that count restarts) after the end of a start.

    The failures are those of the nodes that were lost, and of those whose ranks failed first: ranks that end because
    others were lost say so by their exit code. NCCL's watchdog aborts such ranks, and also a rank whose own GPU has
    failed: a node with that code is to blame only if there is no other reason, and no other such node. If no node was
    lost, the failure of ranks counts as a restart, the first one if the ranks have come further than ever before. In a
    regroup only lost nodes count: ranks that still start up are ended by the signal that asks them to.
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
    step = max(record.step for record in _reached(found))
    num_restarts = (0 if step > last.counted_from else last.num_restarts) + bool(codes and not lost)
    return failures, {"num_restarts": num_restarts, "counted_from": max(step, last.counted_from), "step": step}


def _reached(found: Found) -> list[Record]:
    return [record for record in found.values() if record is not None]
