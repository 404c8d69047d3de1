"""Export of checkpoints: what is compared before it, and where the tokenizer comes from."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.chosen_tokenizers import character_tokenizer
from gpt.checkpoint.export import export_checkpoint, main
from gpt.checkpoint.layout import read_run
from parallel.validation.errors import ConfigError
from tests.unit.gpt.checkpoint.runs import change_layout
from tests.unit.gpt.pretrained.test_tokenizer_files import write_corpus
from zero.checkpoint import saved_state
from zero.checkpoint.saved_state import SavedState


def test_a_header_is_read_once_however_few_files_may_be_open(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saved_state, "MAX_OPEN_FILES", 1)
    checkpoint, headers = runs / "run-a/step-00000002", list[str]()

    def on_read(path: Path, offset: int, _num_bytes: int) -> None:
        headers.extend([path.name] if offset == 0 else [])

    saved = SavedState(checkpoint, read_run(checkpoint).layout["state"], on_read)
    before = len(os.listdir("/proc/self/fd"))
    for name in saved.parameters:
        saved.whole(name)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert sorted(headers) == ["rank-00000.safetensors", "rank-00001.safetensors"]


def assert_refused(checkpoint: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_checkpoint(checkpoint, checkpoint.parent / "out", torch.float32)


def with_model(**options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["model"].update(options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_model(num_layers=10**7), "lacks the parameter blocks.1.attention.qkv.weight"),
        (with_model(hidden_size=2**20), "token_embedding.weight has the shape"),
        (with_model(num_heads=3), "layout.json is damaged: model.hidden_size=8 is not divisible"),
    ],
)
def test_the_configuration_is_compared_with_the_shapes(runs: Path, tmp_path: Path, change: Callable, message: str):
    checkpoint = shutil.copytree(runs / "run-a/step-00000002", tmp_path / "step-00000002")
    change_layout(checkpoint, change)
    assert_refused(checkpoint, message)


def test_a_file_of_another_step_is_not_exported(runs: Path, tmp_path: Path):
    run, file = shutil.copytree(runs / "run-a", tmp_path / "run-a"), "rank-00001.safetensors"
    shutil.copy(run / "step-00000001" / file, run / "step-00000002" / file)
    assert_refused(run, f"{file} belongs to another checkpoint")


def test_a_folder_without_a_checkpoint_is_not_exported(tmp_path: Path):
    assert_refused(tmp_path, r"holds no complete checkpoint; give the folder of one, or .*checkpoints$")


def test_the_command_takes_the_tokenizer_of_the_run_or_of_the_option(runs: Path, tmp_path: Path):
    tokenizer = character_tokenizer(["abc"])
    write_corpus(tmp_path / "corpus", tokenizer)
    main([str(runs / "run-a"), "--output", str(tmp_path / "out"), "--data", str(tmp_path / "corpus")])
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("cab") == tokenizer.encode("cab")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.eos_token_id == tokenizer.eod
