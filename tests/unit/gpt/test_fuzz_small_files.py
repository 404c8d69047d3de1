"""Small files beside a run and its data that are damaged: each is read, or is an error of one line that names it."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from data.chosen_tokenizers import named_tokenizer
from data.errors import DataError
from data.staging import PROGRESS, Progress
from data.tokenizer import Tokenizer
from gpt.checkpoint.folder import BEGAN_FROM, LATEST, find, goes_on
from gpt.monitor.collectives import PROFILE
from gpt.monitor.compare import comparison_table, read_runs, read_settings
from gpt.pretrained.weights import load_pretrained, write_weights
from gpt.run_folder.files import CONFIG, METRICS, NAME, NUMBERS_OF_A_STEP, append_records, read_name
from gpt.run_folder.lock import HOLDER, RunLock
from gpt.tasks import load_task
from lab.dryrun import collectives
from lab.measure.cluster import ClusterSpec
from lab.published.rows import ROOT, ROWS, read_rows
from parallel.validation.errors import ConfigError
from parallel.world import LAUNCH_VARIABLE
from tests.fuzz import DAMAGE, DAMAGE_OF_JSON, Damage, fuzzed, result_unless_refused, run_examples
from tests.unit.gpt.model.models import small_config, small_gpt

WORDS = Tokenizer(Backend(WordLevel({"<|endoftext|>": 0, "a": 1, "?": 2}, unk_token="?")), 0)
QUESTIONS = [
    {"activity_label": "a", "ctx_a": "b [c] d", "ctx_b": "e", "endings": ["f", "g"], "label": "1"},
    {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"},
]
MODEL = small_config(num_layers=1, hidden_size=6)
PROGRESS_OF_PLAN = Progress("plan", read=9, empty=1, rejected=2, weight=1.5, bin_bytes=80, rejected_bytes=7)


class Kind(NamedTuple):
    """A kind of file: what writes it in a folder, its name there, what reads it, and what it may raise."""

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    refusal: type[Exception] = ConfigError
    is_sealed: bool = False  # what is read is then nothing, or what was written


def write_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def write_metrics(folder: Path) -> None:
    append_records(folder, [dict.fromkeys(NUMBERS_OF_A_STEP, step / 3) | {"step": step} for step in range(1, 5)])


def write_tokenizer(folder: Path) -> None:
    WORDS.save(folder / "tokenizer.json")
    content = {"add_bos_token": True, "bos_token": {"content": "a"}, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def write_shards(folder: Path) -> None:
    write_weights(folder, MODEL, small_gpt(MODEL).state_dict().items(), file_bytes=1000)


def load_shards(folder: Path) -> None:
    model = small_gpt(MODEL, seed=2)
    load_pretrained(model, folder)
    assert all(param.isfinite().all() for param in model.parameters())


def write_profile(folder: Path) -> None:
    row = {"axis": "data", "op": "all_reduce", "phase": "step", "count": 3, "wire_bytes": 24.0}
    (folder / PROFILE).write_text(json.dumps({"collectives": [row, row | {"op": "all_gather"}]}))


def compare_profiles(folder: Path) -> None:
    rows = collectives.read_profile(folder)
    collectives.comparison_table({"a": rows, "b": rows[:1]})


def take_lock(folder: Path) -> None:
    """Let a job hold the lock of the folder, and another one that reads who holds it try to take it."""
    first, second = RunLock(folder), RunLock(folder)
    holder = (folder / HOLDER).read_bytes()
    first.take()
    (folder / HOLDER).write_bytes(holder)
    try:
        second.take()
    finally:
        first.release()
        second.release()


def saved_progress(folder: Path) -> Progress | None:
    found = Progress.load(folder, "plan")
    return found if found.read else None


KINDS = [
    Kind(
        "task.jsonl",
        write_text("task.jsonl", "\n".join(map(json.dumps, QUESTIONS))),
        lambda folder: load_task(folder / "task.jsonl", WORDS, 8),
        DataError,
    ),
    Kind("tokenizer_config.json", write_tokenizer, lambda folder: named_tokenizer(str(folder)), DataError),
    Kind(METRICS, write_metrics, lambda folder: comparison_table(read_runs([folder]))),
    Kind(CONFIG, write_text(CONFIG, "model: {num_layers: 2}\ndata:\n  path: a\n"), read_settings),
    Kind("model.safetensors.index.json", write_shards, load_shards),
    Kind(HOLDER, write_text(HOLDER, "launch 1"), take_lock),
    Kind(LATEST, write_text(LATEST, "step-00000001"), lambda folder: find(folder, "auto")),
    Kind(
        BEGAN_FROM,
        write_text(BEGAN_FROM, "/runs/other/checkpoints/step-00000001"),
        lambda folder: goes_on(folder, "/runs/other/checkpoints/step-00000001"),
    ),
    Kind(NAME, write_text(NAME, "0123456789ab"), read_name),
    Kind(PROFILE, write_profile, compare_profiles),
    Kind(
        "cluster.yaml",
        write_text("cluster.yaml", (ROOT / "configs/clusters/dgx-h100.yaml").read_text()),
        lambda folder: ClusterSpec.load(folder / "cluster.yaml"),
    ),
    Kind(
        "rows.csv",
        write_text("rows.csv", "".join(ROWS.read_text().splitlines(keepends=True)[:8])),
        lambda folder: read_rows(folder / "rows.csv"),
    ),
    Kind(PROGRESS, PROGRESS_OF_PLAN.save, saved_progress, is_sealed=True),
]


@fuzzed(few=20, many=500)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_small_file_is_read_or_refused(num_examples: int, kind: Kind, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv(LAUNCH_VARIABLE, "launch 2")
    kind.write(tmp_path)
    file = tmp_path / kind.name
    whole, expected = file.read_bytes(), kind.read(tmp_path) if kind.is_sealed else None

    def check(damage: Damage) -> None:
        file.write_bytes(damage(whole))
        found = result_unless_refused(partial(kind.read, tmp_path), kind.refusal, tmp_path)
        assert not kind.is_sealed or found in (None, expected)

    is_json = whole.startswith(b"{") and kind.name.endswith(".json")
    run_examples(num_examples, check, DAMAGE_OF_JSON if is_json else DAMAGE)


NO_TEXT = [
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b"launch " + b"9" * 5000,
    json.dumps({"read": "9", "plan": "plan"}).encode(),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_small_file_of_something_else_is_read_as_none_or_refused(kind: Kind, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv(LAUNCH_VARIABLE, "launch 2")
    kind.write(tmp_path)
    for content in NO_TEXT:
        (tmp_path / kind.name).write_bytes(content)
        found = result_unless_refused(partial(kind.read, tmp_path), kind.refusal, tmp_path)
        assert not kind.is_sealed or found is None
