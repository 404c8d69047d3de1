"""Snapshots: checkpoints in the memory of the nodes, from which a run resumes if they are newer than those on disk.

    SNAPSHOT_DIR/NAME-1a2b3c4d/.node                               what tells this node's memory from other nodes'
                               step-00000120/layout.json           on every node
                                             rank-00000...         of the node's ranks, and of their partners' ranks

A rank writes its file as for a checkpoint, and sends it to a partner on the next node. A generation is complete if
every rank's file is on some node. The older one is deleted when the next save begins: two exist at any time.

The memory is that of all users of a node, and the path can be guessed: so the folder is this user's own, who alone may
read it, and a snapshot is loaded only if it has the random name of the run.
"""

import logging
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.builder.train_state import TrainState
from gpt.checkpoint.checkpoint import RunSaver, check_run, rank_state
from gpt.checkpoint.folder import Kept, checkpoint_name, checkpoints, delete_old, remove_partial
from gpt.checkpoint.layout import Progress, read_run
from gpt.checkpoint.parts import Parts
from gpt.settings.run import CheckpointSettings
from parallel.pairwise import SideMessages
from parallel.store import Decisions
from parallel.validation.errors import ConfigError
from parallel.validation.files import NOTE_BYTES, read_limited
from parallel.validation.paths import remove
from zero.checkpoint.layout_file import LAYOUT, rank_file, verify_file
from zero.checkpoint.sealed_file import verify
from zero.checkpoint.writer import Publication, SaveError

logger = logging.getLogger(__name__)

REMEDY = "make room in checkpoint.snapshot_dir (the snapshot before it is untouched)"
NODE = ".node"


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
        self._decisions, self._messages = Decisions(self._rank, state.mesh.size), SideMessages()
        self._nodes: list[list[int]] = self._decisions.decide(_node_of(self._folder), _ranks_by_value)
        self._node = next(node for node in self._nodes if self._rank in node)
        self._is_host = self._node[0] == self._rank
        hosts = [node[0] for node in self._nodes]
        publication = Publication(
            REMEDY, on_chunk=on_chunk, on_written=self._send_to_partner, hosts=hosts, make_room=self._delete_older
        )
        self._saver = RunSaver(self._folder, state, kept=Kept(2), is_async=True, data=data, publication=publication)
        self._saving: int | None = None

    def save(self, progress: Progress) -> None:
        """Wait for the previous snapshot, and begin another one. A failure is logged, and training goes on."""
        self.settle()
        self._saving = progress.step
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

    def load_newest(self, after: int, name: str | None) -> tuple[Progress, Path] | None:
        """Load the newest complete snapshot of a later step than `after`; return None if there is none.

        Those that are damaged or incomplete cost a line each, and those of another run than `name`, as the first rank
        sees it: "" if an earlier version has not written it, and None if the run begins.
        """
        later = [step for step in checkpoints(self._folder) if step > after]
        name, steps = self._decisions.decide([name, later], _steps_of_all)
        for step in reversed(steps):
            generation = self._folder / checkpoint_name(step)
            holders = self._decisions.decide(self._verify(generation), _holders_of_complete)
            if isinstance(holders, str):
                if self._rank == 0:
                    logger.warning("the snapshot of step %d is not used: %s", step, holders)
                continue
            parts = Parts(generation, holders, self._node, self._messages, f".resume-{self._rank}")
            try:
                run = read_run(parts.take_layout())
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

    def _verify(self, generation: Path) -> dict[str, Any]:
        """Read this rank's part of the generation's files on its node.

        Return the seal of layout.json, the numbers of the files that are undamaged and of all files, and a problem.
        """
        found: dict[str, Any] = {"layout": None, "files": [], "num_files": 0, "problem": ""}
        if not generation.exists():
            return found
        try:
            found["layout"], run = verify(generation / LAYOUT), read_run(generation)
        except ConfigError as error:
            return found | {"layout": None, "problem": str(error)}
        found["num_files"] = len(run.layout["files"])
        present = [number for number in range(found["num_files"]) if rank_file(generation, number).exists()]
        for number in present[self._node.index(self._rank) :: len(self._node)]:
            try:
                verify_file(generation, run.layout, number, run.progress.save_name)
                found["files"].append(number)
            except ConfigError as error:
                found["problem"] = str(error)
        return found

    def _delete_older(self) -> None:
        """Make room. A crash from here on finds the generation that all nodes have."""
        # Beside training: it takes longer than the copy, because a node has the files of its ranks and their partners.
        if self._is_host:
            delete_old(self._folder, Kept(1))

    def _send_to_partner(self, partial: Path, is_written: bool) -> None:
        """Send this rank's file to the next node, and write those of the ranks whose partner this one is."""
        number, place = self._nodes.index(self._node), self._node.index(self._rank)
        next_node = self._nodes[(number + 1) % len(self._nodes)]
        sent = {}
        if is_written and next_node is not self._node:
            sent[next_node[place % len(next_node)]] = _mapped(rank_file(partial, self._rank))
        failures: list[OSError] = []

        def receive(source: int, num_bytes: int) -> Tensor:
            try:
                partial.mkdir(parents=True, exist_ok=True)
                with rank_file(partial, source).open("wb") as file:
                    # Before it is mapped: a page for which there is no room would end the process.
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                return _mapped(rank_file(partial, source))
            except OSError as error:
                failures.append(error)
                return torch.empty(num_bytes, dtype=torch.uint8)  # the message has to be received

        self._messages.exchange(sent, receive)
        if failures:
            raise failures[0]


def _mapped(path: Path) -> Tensor:
    """Return the bytes of a file as a tensor in the same memory."""
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


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


def _ranks_by_value(values: list[str]) -> list[list[int]]:
    return [[rank for rank, other in enumerate(values) if other == value] for value in dict.fromkeys(values)]


def _steps_of_all(found: list[tuple[str | None, list[int]]]) -> tuple[str | None, list[int]]:
    name, _ = found[0]
    return name, [] if name is None else sorted({step for _, steps in found for step in steps})


def _holders_of_complete(found: list[dict[str, Any]]) -> dict[str, Any] | str:
    """Return the seal of the layout.json that all files belong to, and who has them; or why there is none."""
    reasons = [of_rank["problem"] for of_rank in found if of_rank["problem"]]
    for seal in dict.fromkeys(tuple(of_rank["layout"]) for of_rank in found if of_rank["layout"]):
        ranks = {rank: of_rank for rank, of_rank in enumerate(found) if of_rank["layout"] == list(seal)}
        num_files = next(iter(ranks.values()))["num_files"]
        holders = [[rank for rank, has in ranks.items() if number in has["files"]] for number in range(num_files)]
        if all(holders):
            return {"layout_bytes": seal[1], "layouts": list(ranks), "files": holders}
        missing = [str(number) for number, of_file in enumerate(holders) if not of_file]
        reasons.append(f"no node has the file of rank {', '.join(missing)}")
    return "; ".join(reasons) or "its layout.json is on no node"
