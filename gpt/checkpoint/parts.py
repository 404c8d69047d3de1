"""The parts of a snapshot that a rank needs of other nodes, fetched into files with holes.

    layout.json    from a node that has it
    rank-N         on this node: a link. Elsewhere: a file of its size, of which these bytes are fetched, in this order:
                   the header's length, the header, what is not sharded if it is this rank's own, and what a trial reads

A trial loads the state from the files as they are, and records what it reads: holes are zeros. Headers alone decide
what is read, so a second load then reads the same bytes, and all of them are there. Those who send have verified them.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel.pairwise import SideMessages
from parallel.validation.paths import remove
from zero.checkpoint.layout_file import LAYOUT, rank_file
from zero.checkpoint.rank_state import RankState
from zero.checkpoint.saved_state import PART_NAME, SavedState

LAYOUT_NUMBER = -1  # of layout.json among the files
LENGTH_BYTES = 8  # at the beginning of a file: the bytes of its header


class Piece(NamedTuple):
    """Some bytes of one file."""

    file: int
    offset: int
    num_bytes: int


class Parts:
    """The files of a snapshot, `generation`, as one rank sees them. All ranks make the same calls.

    `found` says which ranks have layout.json, and which have verified each file; `node` are the ranks of this node.
    """

    def __init__(
        self, generation: Path, found: Mapping[str, Any], node: Sequence[int], messages: SideMessages, name: str
    ):
        self._generation, self._folder, self._messages = generation, generation.with_name(name), messages
        self._found = found
        here = set(node)
        self._absent = [number for number, ranks in enumerate(found["files"]) if not here & set(ranks)]
        self._has_layout = bool(here & set(found["layouts"]))
        self.delete()
        self._folder.mkdir()
        for number in set(range(len(found["files"]))) - set(self._absent):
            rank_file(self._folder, number).symlink_to(rank_file(generation, number).absolute())

    def take_layout(self) -> Path:
        """Return a folder with layout.json."""
        if self._has_layout:
            (self._folder / LAYOUT).symlink_to((self._generation / LAYOUT).absolute())
        else:
            (self._folder / LAYOUT).touch()
        self._fetch([] if self._has_layout else [Piece(LAYOUT_NUMBER, 0, self._found["layout_bytes"])])
        return self._folder

    def load(self, own: RankState, layout: Mapping[str, Any]) -> None:
        """Fetch what this rank needs of other nodes, and load it."""
        for number in self._absent:
            self._path(number).touch()
            os.truncate(self._path(number), layout["files"][number][1])
        self._fetch([Piece(number, 0, LENGTH_BYTES) for number in self._absent])
        self._fetch([Piece(number, LENGTH_BYTES, self._header_bytes(number)) for number in self._absent])
        read: dict[Piece, None] = {}
        numbers = {self._path(number): number for number in self._absent}

        def on_read(path: Path, offset: int, num_bytes: int) -> None:
            if path in numbers and num_bytes:
                read[Piece(numbers[path], offset, num_bytes)] = None

        saved = SavedState(self._folder, layout["state"], on_read)
        file = saved.file(own.number_of_own(saved))
        for name in file.entries:
            if not PART_NAME.fullmatch(name):
                file.tensor(name)
        self._fetch(list(read))  # among it the random states, which zeros are not
        read.clear()
        own.load_verified(saved, layout)
        self._fetch(list(read))
        own.load_verified(saved, layout)

    def delete(self) -> None:
        """Delete what was fetched; what is on this node stays."""
        remove(self._folder)

    def _path(self, number: int, folder: Path | None = None) -> Path:
        folder = folder or self._folder
        return folder / LAYOUT if number == LAYOUT_NUMBER else rank_file(folder, number)

    def _header_bytes(self, number: int) -> int:
        with self._path(number).open("rb") as file:
            return int.from_bytes(file.read(LENGTH_BYTES), "little")

    def _fetch(self, pieces: list[Piece]) -> None:
        """Fetch pieces of files that this node does not have, and send to others what they ask this rank for."""
        wanted: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            has = self._found["layouts"] if piece.file == LAYOUT_NUMBER else self._found["files"][piece.file]
            wanted[has[0]].append(piece)
        asked = self._messages.exchange({rank: _as_bytes(of_rank) for rank, of_rank in wanted.items()})
        sent = {rank: self._read(request.view(torch.int64).view(-1, 3).tolist()) for rank, request in asked.items()}
        for rank, received in self._messages.exchange(sent).items():
            for piece, part in zip(wanted[rank], received.split([p.num_bytes for p in wanted[rank]]), strict=True):
                with self._path(piece.file).open("r+b") as file:
                    file.seek(piece.offset)
                    file.write(part.numpy())

    def _read(self, pieces: list[list[int]]) -> Tensor:
        out, done = torch.empty(sum(num_bytes for *_, num_bytes in pieces), dtype=torch.uint8), 0
        for number, offset, num_bytes in pieces:
            with self._path(number, self._generation).open("rb", buffering=0) as file:
                file.seek(offset)
                file.readinto(out.numpy()[done : done + num_bytes].data)
            done += num_bytes
        return out


def _as_bytes(pieces: list[Piece]) -> Tensor:
    return torch.tensor(pieces, dtype=torch.int64).view(-1).view(torch.uint8)
