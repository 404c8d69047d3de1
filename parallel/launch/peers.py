"""The records of all nodes: an agent publishes its own, reads those of the others, and asks the arbiter."""

import asyncio
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from parallel.launch.channel import Channel
from parallel.launch.membership import SILENT_SECONDS, Record
from parallel.launch.node_facts import NodeFacts, seconds_ahead
from parallel.validation.errors import ConfigError
from parallel.validation.fields import parse_json

ARBITER = "the arbiter"  # scripts/launch/arbiter.py


class Peers:
    """The records of all nodes: publishes this node's own, and reads the others'. Raises OSError if the port is in use.

    `addresses`: (host, port) by node, in the order of the list. `facts` are served beside the record, for the leader.
    """

    def __init__(self, own: Record, addresses: Mapping[str, tuple[str, int]], secret: bytes, facts: NodeFacts):
        self.own, self._addresses, self._facts = own, addresses, facts
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

    def facts(self, node: str) -> NodeFacts:
        """Return the facts of a node. Raises OSError or ValueError."""
        asked = time.time()
        facts = parse_json(NodeFacts, self._channel.run(self._channel.ask(self._addresses[node], node, {"facts": 1})))
        return replace(facts, clock_seconds=seconds_ahead(facts.clock_seconds, asked, time.time()))

    def is_granted(self, arbiter: tuple[str, int], start: int) -> bool:
        """Ask the arbiter for a start. Raises OSError or ValueError if it cannot be reached."""
        own = f"{self.own.node} {self.own.incarnation}"
        return self._channel.run(self._channel.ask(arbiter, ARBITER, {"start": start, "by": own})) == "granted"

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
            self.stranger = str(error) if isinstance(error, ConfigError) else ""
            return node, last if time.monotonic() - since < SILENT_SECONDS else None
        self._seen[node] = time.monotonic(), digest, last
        return node, last

    def _answer(self, request: dict[str, Any]) -> str:
        if "facts" in request:
            return json.dumps(vars(self._facts) | {"clock_seconds": time.time()})
        text = json.dumps(asdict(self.own))
        # A record that the other one has is not sent again: that of a leader has the names of all nodes.
        return digest if (digest := _digest(text)) == request.get("known") else text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
