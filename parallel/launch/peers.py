"""The records of all nodes: an agent publishes its own, reads those of the others, and asks the arbiter."""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from parallel.launch.channel import Channel, StrangerError
from parallel.launch.membership import SILENT_SECONDS, Record
from parallel.launch.node_facts import MARK_POLL_SECONDS, NodeFacts, seconds_ahead, sees
from parallel.validation.fields import parse_json

ARBITER = "the arbiter"


class Peers:
    """The records of all nodes: publishes this node's own, and reads the others'. Raises OSError if the port is in use.

    `addresses`: (host, port) by node, in the order of the list. `facts` are served beside the record, for the leader;
    `folder` is the job's, where marks are looked for.
    """

    def __init__(
        self,
        own: Record,
        addresses: Mapping[str, tuple[str, int]],
        secret: bytes,
        facts: NodeFacts | None = None,
        folder: Path = Path(),
    ):
        self.own, self._addresses, self._facts, self._folder = own, addresses, facts, folder
        self._since = time.monotonic()  # the last change of the own state
        self._seen: dict[str, tuple[float, str, Record]] = {}  # by node: when, the digest, and the record
        self.stranger = ""  # why the last one that was there has not answered
        self._channel = Channel(secret)
        self._channel.serve(addresses[own.node], own.node, self._answer)

    def become(self, **changes: Any) -> None:
        """Publish another state of this node."""
        self.own = replace(self.own, **changes)
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Return for how long this node has been in its state."""
        return time.monotonic() - self._since

    def read(self, nodes: Iterable[str]) -> dict[str, Record | None]:
        """Return the records of some nodes, this one's own included if it is among them."""

        async def read() -> list[tuple[str, Record | None]]:
            return await asyncio.gather(*map(self._read, nodes))

        return dict(self._channel.run(read()))

    def facts(self, node: str, mark: str, until: float) -> NodeFacts:
        """Return the facts of a node, which looks for the file `mark` in the job's folder, unless that is empty.

        If it does not see it, it is asked again up to this monotonic time. Raises OSError or ValueError.
        """
        while True:
            asked = time.time()
            answer = self._channel.run(self._channel.ask(self._addresses[node], node, {"mark": mark}))
            facts = parse_json(NodeFacts, answer)
            ahead = seconds_ahead(facts.clock_seconds, asked, time.time())
            if facts.shares_folder or time.monotonic() >= until:
                return replace(facts, clock_seconds=ahead)
            time.sleep(MARK_POLL_SECONDS)

    def is_granted(self, arbiter: tuple[str, int], start: int) -> bool:
        """Ask the arbiter for a start. Raises OSError or ValueError if it cannot be reached."""
        request = {"start": start, "by": f"{self.own.node} {self.own.incarnation}"}
        return self._channel.run(self._channel.ask(arbiter, ARBITER, request)) == "granted"

    async def _read(self, node: str) -> tuple[str, Record | None]:
        if node == self.own.node:
            return node, self.own
        since, digest, last = self._seen.get(node, (-SILENT_SECONDS, "", None))
        try:
            answer = await self._channel.ask(self._addresses[node], node, {"known": digest})
            if answer != digest or last is None:
                digest, last = _digest(answer), parse_json(Record, answer)
        except ConnectionRefusedError:
            self._seen.pop(node, None)
            return node, None
        except (OSError, ValueError) as error:
            self.stranger = str(error) if isinstance(error, StrangerError) else ""
            return node, last if time.monotonic() - since < SILENT_SECONDS else None
        self._seen[node] = time.monotonic(), digest, last
        return node, last

    def _answer(self, request: dict[str, Any]) -> str:
        if self._facts is not None and "mark" in request:
            seen = sees(self._folder, str(request["mark"]), 0)
            return json.dumps(vars(self._facts) | {"clock_seconds": time.time(), "shares_folder": seen})
        text = json.dumps(asdict(self.own))
        # A record that the other one has is not sent again: that of a leader has the names of all nodes.
        return digest if (digest := _digest(text)) == request.get("known") else text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def arbitrate(address: tuple[str, int], secret: bytes) -> None:
    """Grant each start of a job to one node, until this process ends. Raises OSError if the port is in use.

    Of the parts of a parted network that can reach the arbiter, the first one goes on, and no other.
    """
    newest, by = 0, ""

    def answer(request: dict[str, Any]) -> str:
        nonlocal newest, by
        if request["start"] > newest:
            newest, by = request["start"], request["by"]
            sys.stderr.write(f"launch: the arbiter grants start {newest} to {by}\n")
        return "granted" if (request["start"], request["by"]) == (newest, by) else "refused"

    Channel(secret).serve(address, ARBITER, answer)
    while True:
        time.sleep(3600.0)
