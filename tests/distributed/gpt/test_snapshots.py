"""Snapshots in the folders of several nodes: a run goes on from the newest complete one, whatever was lost."""

import logging
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from gpt.builder.train_state import TrainState
from gpt.checkpoint import snapshots
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.parts import Parts
from gpt.checkpoint.peer_files import PeerFiles
from gpt.checkpoint.snapshots import Snapshots
from gpt.settings.run import CheckpointSettings
from lab.faults.damage import cut_off, flip_bit
from parallel.store import shared_store
from tests.distributed.gpt.test_checkpoint_layouts import GLOBAL_BATCH, LayoutCase, build, train
from tests.pairwise import noting
from tests.ranks import run_ranks

NUM_STEPS = 6
RUN = Path("/run")  # of which only the name is used
TOKEN_OF_JOB = "1234567890abcdef" * 2


class Resumed(NamedTuple):
    """The continuation of a run: the step of the snapshot or 0, the losses of the steps after it, and warnings."""

    step: int
    losses: list[float]
    warnings: list[str]


def snapshots_of(state: TrainState, folder: Path, num_nodes: int) -> Snapshots:
    """The snapshots of a rank: each of several consecutive ranks stands for one node, with a folder of its own."""
    number = dist.get_rank() * num_nodes // dist.get_world_size()
    config = CheckpointSettings(snapshot_every=2, snapshot_dir=str(folder / f"node{number}"))
    return Snapshots(config, RUN, state, {}, lambda: None)


def saved(case: LayoutCase, folder: Path, num_nodes: int) -> list[float]:
    """The losses of an undisturbed run that saves snapshots of steps 1, 2 and 4: the first one makes room."""
    state = build(case)
    own, losses = snapshots_of(state, folder, num_nodes), []
    for step in range(1, NUM_STEPS + 1):
        losses += train(state, step - 1, 1)
        if step in (1, 2, 4):
            own.save(Progress(step, step * GLOBAL_BATCH, "run"))
    own.settle()
    return losses


def sockets_of_snapshots(case: LayoutCase, folder: Path) -> int:
    """The sockets that a rank has opened for snapshots, of nodes of one rank each, and keeps when one is complete."""
    state, _ = build(case), shared_store()
    before = num_sockets()
    own = snapshots_of(state, folder, case.num_ranks)
    own.save(Progress(1, GLOBAL_BATCH, "run"))
    own.settle()
    dist.barrier()
    return num_sockets() - before


def num_sockets() -> int:
    links = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_keeps_one_socket_for_snapshots_however_many_ranks_there_are(tmp_path: Path, num_ranks: int):
    assert run_ranks(num_ranks, sockets_of_snapshots, LayoutCase(2, data=num_ranks), tmp_path) == [1] * num_ranks


def exchanged(folder: Path) -> list[object]:
    """The finds of the first rank when it has put a file, fetched a part of it, and asked for what it must not have."""
    rank, found = dist.get_rank(), []
    own = folder / str(rank)
    own.mkdir()
    peers = PeerFiles(own, rank, "127.0.0.1", TOKEN_OF_JOB)
    if rank == 0:
        (own / "sent").write_bytes(bytes(range(200)) * 50_000)
        (own / "holes").touch()
        with peers.connected(1) as peer:
            peer.put(own / "sent", "new/received")
            with pytest.raises(OSError, match="No such file"):
                peer.get("missing", 0, 1, own / "holes")
            peer.get("new/received", 5, 3, own / "holes")
            found = [(own / "holes").read_bytes(), (folder / "1/new/received").stat().st_size]
            with pytest.raises(ConnectionError):
                peer.get("../0/sent", 0, 1, own / "holes")
        port = int(shared_store().get(f"files/{TOKEN_OF_JOB}/1").decode().split()[0])
        with socket.create_connection(("127.0.0.1", port), 60) as stranger:
            stranger.sendall(b"0" * 32)
            found.append(stranger.recv(1))
    dist.barrier()
    return found


def test_files_are_put_and_fetched_in_parts_by_ranks_of_the_job_alone(tmp_path: Path):
    expected = [bytes(5) + bytes([5, 6, 7]), 10_000_000, b""]
    assert run_ranks(2, exchanged, tmp_path) == [expected, []]


def test_a_rank_that_is_lost_while_another_one_fetches_is_not_an_error_of_the_user(tmp_path: Path):
    peers, store = PeerFiles(tmp_path, 1, "127.0.0.1", TOKEN_OF_JOB), dist.HashStore()
    peers.close()
    store.set("key/bytes", "10")
    store.set("key/layout.json", "[1]")
    with pytest.raises(RuntimeError, match="Connection refused"):
        Parts(tmp_path / "step-00000001", store, "key", [0], peers, ".resume")


def resumed(case: LayoutCase, folders: list[Path], num_nodes: int, after: int = 0) -> list[Resumed]:
    """Go on from the snapshots in one folder after the other, for two steps each."""
    state = build(case)
    return [resumed_from(folder, state, num_nodes, after) for folder in folders]


def resumed_from(folder: Path, state: TrainState, num_nodes: int, after: int) -> Resumed:
    own, warnings = snapshots_of(state, folder, num_nodes), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    snapshots.logger.addHandler(handler)
    try:
        found = own.load_newest(after, "run")
    finally:
        snapshots.logger.removeHandler(handler)
    step = found[0].step if found else 0
    own.delete_after(step)
    return Resumed(step, train(state, step, 2) if found else [], warnings)


def folder_of(folder: Path, node: int) -> Path:
    return CheckpointSettings(snapshot_dir=str(folder / f"node{node}")).snapshot_folder(RUN)


def names(folder: Path, node: int) -> list[str]:
    return sorted(str(p.relative_to(folder_of(folder, node))) for p in folder_of(folder, node).glob("*/*"))


def lose(*nodes: int) -> Callable[[Path], None]:
    return lambda folder: [shutil.rmtree(folder / f"node{node}") for node in nodes] and None


def damage(how: Callable[[Path], object], *names: str) -> Callable[[Path], None]:
    """Damage files NODE/STEP/NAME, or whole generations NODE/STEP."""

    def change(folder: Path) -> None:
        for name in names:
            node, step, *file = name.split("/")
            how(folder_of(folder, int(node)).joinpath(f"step-{int(step):08d}", *file))

    return change


RANK2, LAYOUT = "rank-00002.safetensors", "layout.json"
THREE = LayoutCase(2, data=4)  # on three nodes: ranks 0 and 1, 2 with a copy on the last node, and 3
DROPOUT = replace(THREE, model=replace(THREE.model, dropout=0.1))
ON_NODE, AT_PEER, OLDER = f"1/4/{RANK2}", f"2/4/{RANK2}", (f"1/2/{RANK2}", f"2/2/{RANK2}")
FOUR = LayoutCase(3, data=2, tensor=2)


# what happens: (loss, step of the snapshot that is left or 0, a warning)
LOSSES: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "nothing": (lose(), 4, ""),
    "the first node": (lose(0), 4, ""),
    "the last node": (lose(2), 4, ""),
    "a bit": (damage(flip_bit, ON_NODE, f"0/4/{LAYOUT}"), 4, ""),
    "the end of copies": (damage(cut_off, AT_PEER, f"2/4/{LAYOUT}"), 4, ""),
    "files": (damage(Path.unlink, ON_NODE, f"0/4/{LAYOUT}"), 4, ""),
    "a generation of a node": (damage(shutil.rmtree, "1/4"), 4, ""),
    "a file and its copy": (damage(flip_bit, ON_NODE, AT_PEER), 2, f"step 4 is not used: .*{RANK2} is damaged"),
    "a generation": (damage(shutil.rmtree, "1/4", "2/4"), 2, "step 4 is not used: no node has the file of rank 2"),
    "the layout": (damage(cut_off, *(f"{n}/4/{LAYOUT}" for n in range(3))), 2, "step 4 is not used: .*layout.json"),
    "two generations": (damage(flip_bit, ON_NODE, AT_PEER, *OLDER), 0, f"step [24] is not used: .*{RANK2} is damaged"),
    "two neighbors": (lose(0, 1), 0, "step [24] is not used: no node has the file of rank 0, 1"),
    "all nodes": (lose(0, 1, 2), 0, ""),
}


def test_a_run_goes_on_with_the_same_bits_after_any_loss(tmp_path: Path):
    losses = run_ranks(4, saved, DROPOUT, tmp_path / "intact", 3, timeout_seconds=40)[0]
    folders = [tmp_path / what for what in LOSSES]
    for folder, (loss, *_) in zip(folders, LOSSES.values(), strict=True):
        shutil.copytree(tmp_path / "intact", folder)
        loss(folder)
    of_ranks = run_ranks(4, resumed, DROPOUT, folders, 3)
    for number, (what, (_, step, warning)) in enumerate(LOSSES.items()):
        with noting(what):
            found = [of_rank[number] for of_rank in of_ranks]
            assert [resumed.step for resumed in found] == [step] * 4
            assert found[0].losses == (losses[step : step + 2] if step else [])
            assert len(found[0].warnings) == (0 if not warning else 1 if step else 2)
            for message in found[0].warnings:
                assert re.search(warning, message)
    # Each node has its own files and those of the node before it, of two generations.
    for node, ranks in enumerate([(0, 1, 3), (0, 1, 2), (2, 3)]):
        files = [LAYOUT, *(f"rank-{rank:05d}.safetensors" for rank in ranks)]
        assert [name for name in names(tmp_path / "nothing", node) if "latest" not in name] == [
            f"step-{step:08d}/{name}" for step in (2, 4) for name in files
        ]
    (found,) = run_ranks(4, resumed, DROPOUT, [tmp_path / "nothing"], 3, after=4)[0]
    assert found.step == 0  # the newest checkpoint is as new


@pytest.mark.parametrize(
    ("case", "num_nodes", "lost", "later", "later_nodes"),
    [
        (FOUR, 2, (0,), FOUR, 2),
        (FOUR, 4, (1, 3), LayoutCase(1, data=4), 3),
        (THREE, 3, (2,), LayoutCase(3, data=2), 2),
        (LayoutCase(1, data=4, shard_size=2, bucket_numel=None), 2, (1,), LayoutCase(0), 1),
        (LayoutCase(0), 1, (), LayoutCase(2, data=4, shard_size=2, optimizer_over="all"), 4),
    ],
)
def test_any_layout_goes_on_from_the_parts_that_are_left(
    tmp_path: Path, case: LayoutCase, num_nodes: int, lost: tuple[int, ...], later: LayoutCase, later_nodes: int
):
    undisturbed = run_ranks(case.num_ranks, saved, case, tmp_path, num_nodes, timeout_seconds=40)[0]
    lose(*lost)(tmp_path)
    found = run_ranks(later.num_ranks, resumed, later, [tmp_path], later_nodes, timeout_seconds=40)
    assert [of_rank[0].step for of_rank in found] == [4] * later.num_ranks
    assert found[0][0].losses == pytest.approx(undisturbed[4:], rel=1e-10)
