"""Checkpoints that are mixed, damaged and sealed again, or of another model: one line that names the file."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from functools import reduce
from operator import delitem, getitem, setitem
from pathlib import Path
from typing import Any

import pytest

from gpt.checkpoint.checkpoint import load
from gpt.checkpoint.layout import Progress, changed_data
from gpt.settings.data import DataSettings
from gpt.settings.settings import Settings
from gpt.settings.training import TrainSettings
from parallel.validation.errors import ConfigError
from tests.unit.gpt.checkpoint.runs import (
    DATA,
    MODEL,
    change_header,
    change_layout,
    load_in_one_process,
    seal_files,
    tiny_state,
)
from zero.checkpoint.layout_file import FORMAT

STEP_1, STEP_2 = "step-00000001", "step-00000002"
RANK_0, RANK_1 = "rank-00000.safetensors", "rank-00001.safetensors"


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """Return a copy of a run, to damage its second checkpoint."""
    return shutil.copytree(runs / "run-a", tmp_path / "run-a")


def assert_refused(checkpoint: Path, message: str, action: Callable[[Path], object] = load_in_one_process) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        action(checkpoint)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 900
    assert str(checkpoint) in str(raised.value)


@pytest.mark.parametrize(
    ("taken", "replaced", "message"),
    [
        (f"run-a/{STEP_1}/{RANK_1}", RANK_1, f"{RANK_1} belongs .* of rank 1 of step 1 of run run-a .* step 2"),
        (f"run-b/{STEP_2}/{RANK_0}", RANK_0, f"{RANK_0} belongs .* of rank 0 of step 2 of run run-b .* run-a"),
        (f"run-a/{STEP_2}/{RANK_0}", RANK_1, f"{RANK_1} belongs .* of rank 0 of step 2 of run run-a .* rank 1"),
        (f"run-a/{STEP_1}/layout.json", "layout.json", "layout.json belongs to another checkpoint: it is of step 1"),
        (f"run-b/{STEP_2}/layout.json", "layout.json", f"{RANK_0} belongs to .* run run-a .* names .* run run-b"),
    ],
)
def test_a_file_of_another_checkpoint_is_named(runs: Path, run: Path, taken: str, replaced: str, message: str):
    shutil.copy(runs / taken, run / STEP_2 / replaced)
    remedy = f"resume from the checkpoint before it with --checkpoint.resume={run / STEP_1}"
    assert_refused(run / STEP_2, f"{message}.*{re.escape(remedy)}")
    load_in_one_process(run / STEP_1)


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets a value inside of JSON."""
    return lambda content: setitem(reduce(getitem, path[:-1], content), path[-1], value)


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: delitem(reduce(getitem, path[:-1], content), path[-1])


BUFFER = ("state", "buffers", 0)
LAYOUTS = [
    (at(*BUFFER, "numel", value=10**12), "its buffers have 1000000000000 elements, its files"),
    (at(*BUFFER, "spans", "final_norm.bias", value=[[16], 1136]), r"final_norm.bias is \[16\] there and \[8\]"),
    (without(*BUFFER, "spans", "final_norm.bias"), "final_norm.bias is missing there"),
    (without("files", 1), "it names 1 files, its 2 ranks wrote as many"),
    (at("progress", "step", value=-1), "progress.step is -1, an integer from 0"),
    (at("progress", "step", value=7), "belongs to another checkpoint: it is of step 7"),
    (without("format"), "format is missing"),
    *((at("format", value=n), f"has format {n}, this program reads {FORMAT}") for n in (FORMAT - 1, FORMAT + 1)),
    (at("model", "num_heads", value=4), "model.num_heads=2, but checkpoint .* is of a model with 4; choose"),
    (at("model", "attention", value=["flash"]), r"layout.json is damaged: .*attention=\['flash'\]"),
    (without("model", "num_heads"), "layout.json is damaged: .*'num_heads'"),
    (at("optimizer", value="SGD"), "was saved with the optimizer SGD, this run has AdamW"),
    (at("optimizer_counters", value=[{}]), "counters of 1 groups of parameters, not of 2"),
    (at("optimizer_counters", value=[{"lr": 1.0}, {}]), "a counter has the name of a setting"),
]


@pytest.mark.parametrize(("change", "message"), LAYOUTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_layout_that_was_changed_and_sealed_again_is_named(run: Path, change: Callable, message: str):
    change_layout(run / STEP_2, change)
    assert_refused(run / STEP_2, message)


MOMENT, WEIGHTS, STEP = "0.exp_avg.0", "0.master.0", "0.step.0"
HEADERS = [
    (at(WEIGHTS, "dtype", value="I32"), "'0.master.0' is torch.int32, torch.float32 is needed"),
    (at(MOMENT, "dtype", value="I32"), "'0.exp_avg.128' is torch.float32, torch.int32 is needed"),
    (lambda header: header.update({"9.master.0": header.pop(WEIGHTS)}), "it has no tensor '0.master.0'"),
    (lambda header: header.update({"other": header.pop(MOMENT)}), r"has the states \['exp_avg_sq', 'step'\], "),
    (lambda header: header.update({"other": header.pop("random.cpu")}), "it has no tensor 'random.cpu'"),
    (
        lambda header: header.update({"random.cpu": header.pop("num_skipped"), "other": header.pop("random.cpu")}),
        "random.cpu is not the state of a random generator",
    ),
]


@pytest.mark.parametrize(("change", "message"), HEADERS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_header_that_was_changed_and_sealed_again_is_named(run: Path, change: Callable, message: str):
    change_header(run / STEP_2 / RANK_0, change)
    seal_files(run / STEP_2)
    assert_refused(run / STEP_2, message)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"vocab_size": 19}, "model.vocab_size=19, but checkpoint .* is of a model with 20"),
        ({"seq_length": 5}, "position_embedding.weight is .4, 8. there and .5, 8."),
    ],
)
def test_another_model_is_refused(run: Path, model: dict[str, Any], message: str):
    assert_refused(run / STEP_2, message, lambda checkpoint: load_in_one_process(checkpoint, **model))


def test_another_dropout_is_not(run: Path):
    assert load_in_one_process(run / STEP_2, dropout=0.1).equals(load_in_one_process(run / STEP_2))


def test_settings_that_change_the_data_are_warnings(run: Path, caplog: pytest.LogCaptureFixture):
    state = tiny_state()
    with caplog.at_level(logging.WARNING):
        load(run / STEP_2, state, DATA)
        assert caplog.messages == []
        load(run / STEP_2, state, DATA | {"train.seed": 5, "data.split": [0.8, 0.1, 0.1]})
    assert [message.split(":")[0] for message in caplog.messages] == [
        "train.seed=5, but the checkpoint was saved with 1234",
        "data.split=[0.8, 0.1, 0.1], but the checkpoint was saved with [0.9, 0.05, 0.05]",
    ]


def test_a_change_that_changes_what_dropout_drops_is_told_from_one_of_the_samples():
    saved = {"data.mask_documents": False, "train.compile": "blocks", "activations.store": "none"}
    samples, masks = changed_data(saved, saved | {"data.mask_documents": True, "activations.store": "keep"})
    assert re.fullmatch("data.mask_documents=True, .*: from here on, samples are others", samples)
    assert re.fullmatch("activations.store=keep, .*: from here on, dropout may drop other elements", masks)


@pytest.mark.parametrize("path", ["corpus", ["0.3:a", "0.7:b"]])
def test_settings_that_determine_the_data_are_the_same_after_json(path: str | list[str]):
    settings = Settings(MODEL, DataSettings(path, (0.9, 0.1, 0.0)), train=TrainSettings(seed=3))
    expected = {"train.seed": 3, "data.split": [0.9, 0.1, 0.0], "data.path": path, "data.packing": "stream"}
    expected |= {"data.mask_documents": False}
    assert settings.order_of_samples == json.loads(json.dumps(settings.order_of_samples)) == expected


def test_the_name_of_a_folder_need_not_be_that_of_its_step(run: Path):
    expected = load_in_one_process(run / STEP_2)
    moved = (run / STEP_2).rename(run / "my-favourite")
    assert load_in_one_process(moved).equals(expected)
    assert expected.progress == Progress(2, 4, "run-a")
