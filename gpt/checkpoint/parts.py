"""The files of a snapshot as one rank sees them, in a folder of its own, which `TensorFile` reads as any other.

    layout.json    a link, or that of another node
    rank-N         a link, if this node has it. Elsewhere: a file of its size with holes, of which another rank sends
                   the bytes that are read, before they are read

So a rank asks for the headers and the bytes that it needs, and for no others, however many files there are. Those who
send have verified them.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gpt.checkpoint.peer_files import Peer, PeerFiles
from parallel.validation.errors import ConfigError
from parallel.validation.paths import remove
from zero.checkpoint.layout_file import LAYOUT
from zero.checkpoint.rank_state import RankState
from zero.checkpoint.saved_state import SavedState


class Parts:
    """The files of a snapshot, `generation`, in `folder`; call `delete` at the end.

    The keys `key`/NAME in the store say which ranks have each file, and `node` are those of this node.
    """

    def __init__(
        self, generation: Path, store: dist.Store, key: str, node: Sequence[int], peers: PeerFiles | None, name: str
    ):
        self.folder = generation.with_name(name)
        self._generation, self._store, self._key, self._node, self._peers = generation, store, key, node, peers
        self._connections = ExitStack()
        self._peer = cache(self._connect)
        self._holder: dict[Path, int] = {}  # of the files that this node does not have
        remove(self.folder)
        self.folder.mkdir()
        layout, num_bytes = self.folder / LAYOUT, json.loads(store.get(f"{key}/bytes"))
        self._take(layout, LAYOUT, num_bytes)
        self._read(layout, 0, num_bytes)

    def load(self, own: RankState, layout: Mapping[str, Any]) -> None:
        """Load what this rank needs, and fetch it from other nodes if this one does not have it."""

        def on_read(path: Path, offset: int, num_bytes: int) -> None:
            if not path.exists():
                number = int(path.stem.rpartition("-")[2])
                self._take(path, str(number), layout["files"][number][1])
            self._read(path, offset, num_bytes)

        own.load_verified(SavedState(self.folder, layout["state"], on_read), layout)

    def delete(self) -> None:
        """Delete what was fetched; what is on this node stays."""
        self._connections.close()
        remove(self.folder)

    def _take(self, path: Path, name: str, num_bytes: int) -> None:
        """Make a link to a file of this node, or a file with holes."""
        ranks = json.loads(self._store.get(f"{self._key}/{name}"))
        if not set(ranks).isdisjoint(self._node):
            path.symlink_to((self._generation / path.name).absolute())
            return
        self._holder[path] = ranks[self._node[0] % len(ranks)]
        path.touch()
        os.truncate(path, num_bytes)

    def _read(self, path: Path, offset: int, num_bytes: int) -> None:
        if path in self._holder and num_bytes:
            rank, name = self._holder[path], f"{self._generation.name}/{path.name}"
            try:
                self._peer(rank).get(name, offset, num_bytes, path)
            except (ConnectionError, TimeoutError) as error:  # a restart mends it
                raise RuntimeError(f"Connection closed by peer: rank {rank} does not send {name}: {error}") from error
            except OSError as error:
                raise ConfigError(f"rank {rank} does not send {name} of the snapshot: {error}; start again") from error

    def _connect(self, rank: int) -> Peer:
        assert self._peers is not None  # a node without peers has all files
        return self._connections.enter_context(self._peers.connected(rank))
