"""Checkpoints and folders of weights that are damaged in any way: the same state is loaded, or one line names the file.

Files that are changed and sealed again are the work of a program, not of a disk: if their seals in layout.json are
renewed too, what they hold may differ, but nothing else than a ConfigError may be raised.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from gpt.builder.train_state import TrainState
from gpt.checkpoint.checkpoint import load, rank_state
from gpt.checkpoint.folder import find
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.snapshots import Snapshots
from gpt.pretrained.weights import load_pretrained
from gpt.settings.run import CheckpointSettings
from parallel.validation.errors import ConfigError
from tests.fuzz import NOTHING_LEFT, changes_of_json, fuzzed, result_unless_refused, run_examples
from tests.pretrained_weights import change_config, write_pretrained
from tests.unit.gpt.checkpoint.runs import (
    DATA,
    NAMES,
    RANK_FILES,
    Loaded,
    change_header,
    change_layout,
    seal_files,
    tiny_state,
    train_step,
)
from tests.unit.gpt.model.models import small_config, small_gpt

STEP_1, STEP_2 = "step-00000001", "step-00000002"
Damage = Callable[[Path], None]


def spliced(place: tuple[str, float], removed: int, inserted: bytes) -> Damage:
    def damage(checkpoint: Path) -> None:
        content = (checkpoint / place[0]).read_bytes()
        start = int(place[1] * len(content))
        (checkpoint / place[0]).write_bytes(content[:start] + inserted + content[start + removed :])

    return damage


def replaced(name: str, other: str) -> Damage:
    def damage(checkpoint: Path) -> None:
        shutil.copy(checkpoint.parents[1] / "originals" / other, checkpoint / name)

    return damage


def missing(name: str, instead: str) -> Damage:
    def damage(checkpoint: Path) -> None:
        (checkpoint / name).unlink(missing_ok=True)
        if instead == "folder":
            (checkpoint / name).mkdir()
        if instead == "dangling link":
            (checkpoint / name).symlink_to("nowhere")

    return damage


OTHERS = [f"{run}/{name}" for run in (f"run-a/{STEP_1}", f"run-a/{STEP_2}", f"run-b/{STEP_2}") for name in NAMES]


def damages_of(names: st.SearchStrategy[str]) -> st.SearchStrategy[Damage]:
    places = st.tuples(names, st.floats(0, 1, exclude_max=True))
    return st.one_of(
        st.builds(spliced, places, st.integers(0, 50), st.binary(max_size=20)),
        st.builds(spliced, places, st.just(10**9), st.just(b"")),
        st.builds(missing, names, st.sampled_from(["nothing", "folder", "dangling link"])),
    )


damages_of_a_disk = damages_of(st.sampled_from(NAMES)) | st.builds(
    replaced, st.sampled_from(NAMES), st.sampled_from(OTHERS)
)


def changed_header(name: str, change: Callable[[Any], None], *, is_sealed: bool) -> Damage:
    def damage(checkpoint: Path) -> None:
        change_header(checkpoint / name, change)
        if is_sealed:
            seal_files(checkpoint)

    return damage


sealed_in_itself = st.builds(changed_header, st.sampled_from(RANK_FILES), changes_of_json, is_sealed=st.just(False))
sealed_everywhere = st.one_of(
    st.builds(changed_header, st.sampled_from(RANK_FILES), changes_of_json, is_sealed=st.just(True)),
    st.builds(lambda change: lambda checkpoint: change_layout(checkpoint, change), changes_of_json),
)


@cache
def state_for_all() -> TrainState:
    return tiny_state()


def load_anew(checkpoint: Path) -> Loaded:
    """Load into a state in which all that is loaded has other values."""
    state = state_for_all()
    forget(state)
    return loaded(state, load(checkpoint, state, DATA))


def forget(state: TrainState) -> None:
    for update in state.optimizer.updates:
        update.optimizer.state.clear()
    state.optimizer.num_skipped.fill_(7)
    for bucket in state.optimizer.buckets:
        bucket.master.zero_()  # as what lies between parameters, which is not loaded
    torch.manual_seed(7)


def loaded(state: TrainState, progress: Progress) -> Loaded:
    return Loaded(progress, {name: tensor.clone() for name, tensor in rank_state(state).tensors().items()})


def damaged_copy(runs: Path, tmp_path: Path, damages: list[Damage]) -> Path:
    """Return the path of a copy of the second checkpoint of run-a, damaged."""
    run = tmp_path / "run-a"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(runs / "run-a", run)
    if not (tmp_path / "originals").exists():
        (tmp_path / "originals").symlink_to(runs)
    apply(damages, run / STEP_2)
    return run / STEP_2


def apply(damages: list[Damage], folder: Path) -> None:
    for damage in damages:
        with suppress(*NOTHING_LEFT):
            damage(folder)


@fuzzed(40, 2500)
def test_a_damaged_checkpoint_is_refused_or_loads_the_same(runs: Path, tmp_path: Path, num_examples: int):
    expected = load_anew(runs / "run-a" / STEP_2)

    def check(damages: list[Damage]) -> None:
        checkpoint = damaged_copy(runs, tmp_path, damages)
        assert find(checkpoint.parent, "auto") == checkpoint
        found = result_unless_refused(lambda: load_anew(checkpoint), ConfigError, checkpoint)
        assert found is None or found.equals(expected)

    damage = damages_of_a_disk | damages_of_a_disk | sealed_in_itself
    run_examples(num_examples, check, st.lists(damage, min_size=1, max_size=3))


@fuzzed(5, 500)
def test_a_damaged_snapshot_is_loaded_as_it_was_or_the_one_before_it_is(tmp_path: Path, num_examples: int):
    state, settings = state_for_all(), CheckpointSettings(snapshot_dir=str(tmp_path / "memory"))
    own, folder = Snapshots(settings, tmp_path, state, DATA, lambda: None), settings.snapshot_folder(tmp_path)
    whole: dict[int, Loaded] = {}
    for step in range(1, 3):
        train_step(state, step)
        own.save(Progress(step, 2 * step, "run"))
        own.settle()
        whole[step] = loaded(state, Progress(step, 2 * step, "run"))
    contents = {path: path.read_bytes() for path in (folder / STEP_2).iterdir()}

    def check(damages: list[Damage]) -> None:
        shutil.rmtree(folder / STEP_2)
        (folder / STEP_2).mkdir()
        for path, content in contents.items():
            path.write_bytes(content)
        apply(damages, folder / STEP_2)
        forget(state)
        progress, _ = own.load_newest(0, "run") or (Progress(), folder)
        assert loaded(state, progress).equals(whole[progress.step])

    names = st.sampled_from([path.name for path in contents])
    run_examples(num_examples, check, st.lists(damages_of(names), min_size=1, max_size=2))


@fuzzed(40, 1500)
def test_a_checkpoint_that_is_changed_and_sealed_again_raises_nothing_else(
    runs: Path, tmp_path: Path, num_examples: int
):
    shapes = {name: tensor.shape for name, tensor in load_anew(runs / "run-a" / STEP_2).tensors.items()}

    def check(damages: list[Damage]) -> None:
        checkpoint = damaged_copy(runs, tmp_path, damages)
        found = result_unless_refused(lambda: load_anew(checkpoint), ConfigError, checkpoint)
        if found:
            assert {name: tensor.shape for name, tensor in found.tensors.items()} == shapes
            assert json.dumps(asdict(found.progress))

    run_examples(num_examples, check, st.lists(sealed_everywhere, min_size=1, max_size=2))


MODEL = small_config(num_layers=1, hidden_size=6)


@fuzzed(40, 1000)
def test_weights_of_a_damaged_folder_are_refused_or_finite_and_of_the_right_shape(tmp_path: Path, num_examples: int):
    weights = tmp_path / "weights"
    write_pretrained(weights, MODEL, small_gpt(MODEL).state_dict())
    (file,) = weights.glob("*.safetensors")
    names, originals = (file.name, "config.json"), {path: path.read_bytes() for path in weights.iterdir()}

    def change_of_config(change: Callable[[Any], None]) -> Damage:
        return lambda folder: change_config(folder, change)

    def check(damages: list[Damage]) -> None:
        shutil.rmtree(weights)
        weights.mkdir()
        for path, content in originals.items():
            path.write_bytes(content)
        apply(damages, weights)
        model = small_gpt(MODEL, seed=2)
        result_unless_refused(lambda: load_pretrained(model, weights), ConfigError, weights)
        assert all(param.isfinite().all() for param in model.parameters())

    places = st.tuples(st.sampled_from(names), st.floats(0, 1, exclude_max=True))
    early = st.tuples(st.sampled_from(names), st.floats(0, 0.3))  # the header of the file is here
    run_examples(
        num_examples,
        check,
        st.lists(
            st.one_of(
                st.builds(spliced, places | early, st.integers(0, 50), st.binary(max_size=20)),
                st.builds(missing, st.sampled_from(names), st.sampled_from(["nothing", "folder", "dangling link"])),
                st.builds(changed_header, st.just(file.name), changes_of_json, is_sealed=st.just(False)),
                st.builds(change_of_config, changes_of_json),
            ),
            min_size=1,
            max_size=2,
        ),
    )
