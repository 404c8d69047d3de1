"""Snapshots in the folders of several nodes: a run goes on from the newest complete one, whatever was lost."""

import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from gpt.builder.train_state import TrainState
from gpt.checkpoint import snapshots
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.snapshots import Snapshots
from gpt.settings.run import CheckpointSettings
from lab.faults.damage import cut_off, flip_bit
from tests.distributed.gpt.test_checkpoint_layouts import GLOBAL_BATCH, LayoutCase, build, train
from tests.ranks import run_ranks

NUM_STEPS = 6


class Resumed(NamedTuple):
    """The continuation of a run: the step of the snapshot or 0, the losses of the steps after it, and warnings."""

    step: int
    losses: list[float]
    warnings: list[str]


def snapshots_of(state: TrainState, folder: Path, num_nodes: int) -> Snapshots:
    """The snapshots of a rank: each of several consecutive ranks stands for one node, with a folder of its own."""
    number = dist.get_rank() * num_nodes // dist.get_world_size()
    config = CheckpointSettings(snapshot_every=2, snapshot_dir=str(folder / f"node{number}"))
    return Snapshots(config, folder / "run", state, {}, lambda: None)


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


def resumed(case: LayoutCase, folder: Path, num_nodes: int, after: int = 0) -> Resumed:
    state, warnings = build(case), []
    own = snapshots_of(state, folder, num_nodes)
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    snapshots.logger.addHandler(handler)
    try:
        found = own.load_newest(after, is_continued=True)
    finally:
        snapshots.logger.removeHandler(handler)
    step = found[0].step if found else 0
    own.delete_after(step)
    return Resumed(step, train(state, step, NUM_STEPS - step) if found else [], warnings)


def folder_of(folder: Path, node: int) -> Path:
    return CheckpointSettings(snapshot_dir=str(folder / f"node{node}")).snapshot_folder(folder / "run")


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


def both(*losses: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [loss(folder) for loss in losses] and None


RANK2, LAYOUT = "rank-00002.safetensors", "layout.json"
THREE = LayoutCase(2, data=4)  # on three nodes: ranks 0 and 1, 2 with a copy on the last node, and 3
DROPOUT = replace(THREE, model=replace(THREE.model, dropout=0.1))
ON_NODE, AT_PEER, OLDER = f"1/4/{RANK2}", f"2/4/{RANK2}", (f"1/2/{RANK2}", f"2/2/{RANK2}")
FOUR = LayoutCase(3, data=2, tensor=2)


def run_with_loss(
    folder: Path, case: LayoutCase, num_nodes: int, loss: Callable[[Path], None], later: tuple[LayoutCase, int]
) -> tuple[list[float], list[Resumed]]:
    undisturbed = run_ranks(case.num_ranks, saved, case, folder, num_nodes, timeout_seconds=40)[0]
    loss(folder)
    return undisturbed, run_ranks(later[0].num_ranks, resumed, later[0], folder, later[1], timeout_seconds=40)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of a run that each test damages in its own way, and its losses."""
    folder = tmp_path_factory.mktemp("snapshots")
    losses = run_ranks(4, saved, DROPOUT, folder, 3, timeout_seconds=40)[0]
    shutil.copytree(folder, folder.with_name("intact"))
    return folder, losses


@pytest.mark.parametrize(
    ("loss", "step", "warning"),
    [
        (lose(), 4, ""),
        (lose(0), 4, ""),
        (lose(2), 4, ""),
        (damage(flip_bit, ON_NODE, f"0/4/{LAYOUT}"), 4, ""),
        (damage(cut_off, AT_PEER, f"2/4/{LAYOUT}"), 4, ""),
        (damage(Path.unlink, ON_NODE, f"0/4/{LAYOUT}"), 4, ""),
        (damage(shutil.rmtree, "1/4"), 4, ""),
        (damage(flip_bit, ON_NODE, AT_PEER), 2, f"of step 4 is not used: .*{RANK2} is damaged"),
        (both(damage(cut_off, ON_NODE), damage(Path.unlink, AT_PEER)), 2, f"of step 4 is not used: .*{RANK2}"),
        (damage(shutil.rmtree, "1/4", "2/4"), 2, "of step 4 is not used: no node has the file of rank 2"),
        (damage(cut_off, *(f"{node}/4/{LAYOUT}" for node in range(3))), 2, "of step 4 is not used: .*layout.json"),
        (damage(flip_bit, ON_NODE, AT_PEER, *OLDER), 0, f"of step [24] is not used: .*{RANK2} is damaged"),
        (lose(0, 1), 0, "of step [24] is not used: no node has the file of rank 0, 1"),
        (lose(0, 1, 2), 0, ""),
    ],
)
def test_a_run_goes_on_with_the_same_bits_after_a_loss(
    undisturbed: tuple[Path, list[float]], loss: Callable[[Path], None], step: int, warning: str
):
    folder, losses = undisturbed
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("intact"), folder)
    loss(folder)
    found = run_ranks(4, resumed, DROPOUT, folder, 3, timeout_seconds=40)
    assert [resumed.step for resumed in found] == [step] * 4
    assert found[0].losses == (losses[step:] if step else [])
    assert len(found[0].warnings) == (0 if not warning else 1 if step else 2)
    for message in found[0].warnings:
        assert re.search(warning, message)


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
    undisturbed, found = run_with_loss(tmp_path, case, num_nodes, lose(*lost), (later, later_nodes))
    assert [resumed.step for resumed in found] == [4] * later.num_ranks
    assert found[0].losses == pytest.approx(undisturbed[4:], rel=1e-10)


def test_a_node_has_its_files_and_its_partners_of_two_generations_and_a_resume_leaves_nothing(
    tmp_path: Path,
):
    run_with_loss(tmp_path, FOUR, 2, lose(), (FOUR, 2))
    whole = [LAYOUT, *(f"rank-{rank:05d}.safetensors" for rank in range(4))]
    for node in range(2):
        assert [name for name in names(tmp_path, node) if "latest" not in name] == [
            f"step-{step:08d}/{name}" for step in (2, 4) for name in whole
        ]
    assert run_ranks(4, resumed, FOUR, tmp_path, 2, after=4)[0].step == 0  # the newest checkpoint is as new
