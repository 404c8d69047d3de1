"""Snapshots: checkpoints in the memory of the nodes, from which a run resumes if they are newer than those on disk.

    SNAPSHOT_DIR/NAME-1a2b3c4d/.node                               what tells this node's memory from other nodes'
                               step-00000120/layout.json           on every node
                                             rank-00000...         of the node's ranks, and of their partners' ranks

A rank writes its file as for a checkpoint, and sends it to a partner on the next node, when that one has deleted its
older generation: two exist at any time. A generation is complete if every rank's file is on some node.

The memory is that of all users of a node, and the path can be guessed: so the folder is this user's own, who alone may
read it, and a snapshot is loaded only if it has the random name of the run.
"""

import json
import logging
import os
import re
import secrets
import stat
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpt.builder.train_state import TrainState
from gpt.checkpoint.checkpoint import RunSaver, check_run, rank_state
from gpt.checkpoint.folder import Kept, checkpoint_name, checkpoints, delete_old, remove_partial
from gpt.checkpoint.layout import Progress, read_run
from gpt.checkpoint.parts import Parts
from gpt.checkpoint.peer_files import PeerFiles
from gpt.settings.run import CheckpointSettings
from parallel.store import Decisions, shared_store
from parallel.validation.errors import ConfigError
from parallel.validation.files import NOTE_BYTES, read_limited
from parallel.validation.paths import remove
from parallel.world import address_of_node
from zero.checkpoint.layout_file import LAYOUT, rank_file, verify_file
from zero.checkpoint.sealed_file import verify
from zero.checkpoint.writer import Publication, SaveError

logger = logging.getLogger(__name__)

REMEDY = "make room in checkpoint.snapshot_dir (the snapshot before it is untouched)"
NODE = ".node"
RANK_FILE = re.compile(r"rank-([0-9]+)\.safetensors")
Ranks = list[list[int]]  # [first, stop] of each run of consecutive ranks


class Found(NamedTuple):
    """Facts that a rank has found of a generation on its node, of whose files the ranks there each read a part."""

    layout: tuple[str, int] | None  # the seal of layout.json
    files: list[int]  # the numbers of undamaged files
    num_files: int  # of the generation
    problem: str = ""


class Snapshots:
    """The snapshots of a run. All ranks make the same calls; the settings are those of `Recovery`.

    Raises ConfigError if the folder cannot be written.
    """

    def __init__(
        self,
        config: CheckpointSettings,
        run_dir: Path,
        state: TrainState,
        data: Mapping[str, Any],
        on_chunk: Callable[[], None],
        on_failure: Callable[[str], None] = logger.error,
    ):
        self._state, self._rank, self._data, self._on_failure = state, state.mesh.rank, data, on_failure
        self._folder = config.snapshot_folder(run_dir)
        self._decisions, self._store = Decisions(self._rank, state.mesh.size), shared_store()
        # The token, which nobody else knows, is also a part of keys: another object of this job does not see them.
        own = [secrets.token_hex(16), _node_of(self._folder)]
        found = self._decisions.decide(own, lambda found: [found[0][0], _ranks_by_value([node for _, node in found])])
        self._token: str = found[0]
        nodes: list[Ranks] = found[1]
        self._number = next(number for number, node in enumerate(nodes) if self._rank in _numbers(node))
        self._node, self._next = _numbers(nodes[self._number]), _numbers(nodes[(self._number + 1) % len(nodes)])
        self._is_host, self._num_nodes, self._num_saves = self._node[0] == self._rank, len(nodes), 0
        hosts = [node[0][0] for node in nodes]
        self._peers = PeerFiles(self._folder, self._rank, address_of_node(), self._token) if len(nodes) > 1 else None
        publication = Publication(
            REMEDY, on_chunk=on_chunk, on_written=self._send_to_partner, hosts=hosts, make_room=self._make_room
        )
        self._saver = RunSaver(self._folder, state, kept=Kept(2), is_async=True, data=data, publication=publication)
        self._saving: int | None = None

    def save(self, progress: Progress) -> None:
        """Wait for the previous snapshot, and begin another one. A failure is logged, and training goes on."""
        self.settle()
        self._saving = progress.step
        self._num_saves += 1
        self._saver.start(progress)

    def settle(self) -> None:
        """Wait for the snapshot that has begun; one that failed on some node is deleted on all."""
        try:
            self._saver.wait()
        except SaveError as error:
            if self._is_host:
                remove(self._folder / checkpoint_name(self._saving or 0))
            if self._rank == 0:
                self._on_failure(str(error))

    def delete_after(self, step: int) -> None:
        """Delete the snapshots of steps that the run will take again, and what interrupted saves have left."""
        self.settle()
        if self._is_host:
            remove_partial(self._folder)
            for path in (path for saved, path in checkpoints(self._folder).items() if saved > step):
                remove(path)

    def delete_all(self) -> None:
        """Give the memory back. Call it when the run has ended."""
        self.settle()
        if self._is_host:
            remove(self._folder)
        if self._peers:
            self._peers.close()

    def load_newest(self, after: int, name: str | None) -> tuple[Progress, Path] | None:
        """Load the newest complete snapshot of a later step than `after`; return None if there is none.

        Those that are damaged or incomplete cost a line each, and those of another run than `name`, as the first rank
        sees it: "" if an earlier version has not written it, and None if the run begins.
        """
        later = [step for step in checkpoints(self._folder) if step > after]
        name, steps = self._decisions.decide([name, later], _steps_of_all)
        for step in reversed(steps):
            generation = self._folder / checkpoint_name(step)
            key = f"snapshots/{step}/{secrets.token_hex(4)}"
            chosen = self._decisions.decide([key, self._verify(generation)], self._choose_holders)
            if isinstance(chosen, str):
                if self._rank == 0:
                    logger.warning("the snapshot of step %d is not used: %s", step, chosen)
                continue
            parts = Parts(generation, self._store, chosen[0], self._node, self._peers, f".resume-{self._rank}")
            try:
                run = read_run(parts.folder)
                if name not in ("", run.progress.run):
                    if self._rank == 0:
                        logger.warning("the snapshot of step %d is not used: it is of another run", step)
                    continue
                own = rank_state(self._state)
                check_run(generation, run, own, self._state.config, self._data)
                parts.load(own, run.layout)
            finally:
                parts.delete()
            return run.progress, generation
        return None

    def _verify(self, generation: Path) -> Found:
        """Read this rank's part of the generation's files on its node."""
        if not generation.exists():
            return Found(None, [], 0)
        try:
            layout, run = verify(generation / LAYOUT), read_run(generation)
        except ConfigError as error:
            return Found(None, [], 0, str(error))
        num_files, files, problem = len(run.layout["files"]), [], ""
        matches = (RANK_FILE.fullmatch(path.name) for path in generation.iterdir())
        present = sorted(number for found in matches if found and (number := int(found[1])) < num_files)
        for number in present[self._node.index(self._rank) :: len(self._node)]:
            try:
                verify_file(generation, run.layout, number, run.progress.save_name)
                files.append(number)
            except ConfigError as error:
                problem = str(error)
        return Found(layout, files, num_files, problem)

    def _choose_holders(self, found: list[Any]) -> list[str] | str:
        """Tell in the store which ranks have each file, by the first rank's key, which is returned; or why not all are.

        So a rank reads of the many files only who has those that it needs.
        """
        key, by_rank = found[0][0], [Found(*of_rank) for _, of_rank in found]
        holders = _holders_of_complete(by_rank)
        if isinstance(holders, str):
            return holders
        num_bytes, ranks_of = holders
        values = {"bytes": num_bytes, **ranks_of}
        texts = [json.dumps(value) for value in values.values()]
        self._store.multi_set([f"{key}/{name}" for name in values], texts)  # type: ignore[attr-defined]
        return [key]

    def _make_room(self) -> None:
        """Delete the older generation. A crash from here on finds the one that all nodes have."""
        # Beside training: it takes longer than the copy, because a node has the files of its ranks and their partners.
        if self._is_host:
            try:
                delete_old(self._folder, Kept(1))
            finally:
                self._store.set(self._room(self._number, self._num_saves), "")
                self._store.delete_key(self._room(self._number, self._num_saves - 2))  # of which nobody asks any more

    def _room(self, node: int, save: int) -> str:
        return f"snapshots/{self._token}/room/{node}/{save}"

    def _send_to_partner(self, partial: Path, is_written: bool) -> None:
        """Send this rank's file to the next node."""
        if self._peers is None or not is_written:
            return
        self._store.wait([self._room((self._number + 1) % self._num_nodes, self._num_saves)])
        path = rank_file(partial, self._rank)
        with self._peers.connected(self._next[self._node.index(self._rank) % len(self._next)]) as partner:
            partner.put(path, f"{partial.name}/{path.name}")


def _make_own(folder: Path) -> None:
    """Make a folder that only this user reads. Raises ConfigError if it, or the one above it, is another user's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    for path, found in ((folder.parent, folder.parent.stat()), (folder, folder.lstat())):
        # Nobody else can rename what is in a folder of this user, nor in one of the system like /tmp.
        is_of_system = path != folder and found.st_uid == 0 and found.st_mode & stat.S_ISVTX
        if not stat.S_ISDIR(found.st_mode) or not (found.st_uid == os.geteuid() or is_of_system):
            raise ConfigError(
                f"checkpoint.snapshot_dir: {path} is a link, or of another user (number {found.st_uid}), who could "
                "change snapshots; choose another folder in memory, such as /dev/shm/NAME"
            )
    folder.chmod(0o700)


def _node_of(folder: Path) -> str:
    """Return a text that the ranks that share the folder have in common, and no others."""
    try:
        _make_own(folder)
        own = folder / f"{NODE}-{secrets.token_hex(8)}"
        own.write_text(own.name)
        with suppress(FileExistsError):
            os.link(own, folder / NODE)  # complete from the beginning, and the first one's
        own.unlink()
        return read_limited(folder / NODE, NOTE_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"checkpoint.snapshot_dir: {folder} cannot be written ({error.strerror}); choose another folder in memory, "
            "or checkpoint.snapshot_every=0"
        ) from error


def _ranks_by_value(values: list[str]) -> list[Ranks]:
    ranks: defaultdict[str, Ranks] = defaultdict(list)
    for rank, value in enumerate(values):
        of_value = ranks[value]
        if of_value and of_value[-1][1] == rank:
            of_value[-1][1] += 1
        else:
            of_value.append([rank, rank + 1])
    return list(ranks.values())


def _numbers(ranks: Ranks) -> list[int]:
    return [rank for first, stop in ranks for rank in range(first, stop)]


def _steps_of_all(found: list[tuple[str | None, list[int]]]) -> tuple[str | None, list[int]]:
    name, _ = found[0]
    return name, [] if name is None else sorted({step for _, steps in found for step in steps})


def _holders_of_complete(found: list[Found]) -> tuple[int, dict[int | str, list[int]]] | str:
    """Return the bytes of layout.json, and who has it and each file that belongs to it; or why they are incomplete."""
    reasons = [of_rank.problem for of_rank in found if of_rank.problem]
    holders: dict[tuple[str, int], dict[int | str, list[int]]] = {}
    for rank, of_rank in enumerate(found):
        if of_rank.layout:
            seal, num_bytes = of_rank.layout
            empty: dict[int | str, list[int]] = {LAYOUT: [], **{number: [] for number in range(of_rank.num_files)}}
            of_seal = holders.setdefault((seal, num_bytes), empty)
            names: list[int | str] = [LAYOUT, *of_rank.files]
            for name in names:
                of_seal[name].append(rank)
    for (_, num_bytes), of_seal in holders.items():
        if all(of_seal.values()):
            return num_bytes, of_seal
        missing = [str(number) for number, ranks in of_seal.items() if not ranks]
        reasons.append(f"no node has the file of rank {', '.join(missing)}")
    return "; ".join(reasons) or "its layout.json is on no node"
