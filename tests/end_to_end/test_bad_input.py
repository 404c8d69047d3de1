"""Mistakes that a user can correct: one line with setting, numbers and remedy, exit code 2, and no traceback."""

import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.staging import IndexedWriter
from gpt.settings.parser import parse_settings
from parallel.errors import ConfigError
from parallel.world import World, start_world
from pretrain_gpt import pretrain
from tests.end_to_end.runs import options, run_on_rank
from tests.programs import run_python
from tests.ranks import run_ranks


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("precision", "has_bf16", "best"), [("bf16", True, None), ("bf16", False, "fp32"), ("fp16", True, "bf16")]
)
def test_a_precision_that_is_slow_on_a_cpu_is_named_once(monkeypatch, tmp_path, caplog, precision, has_bf16, best):
    monkeypatch.setattr("pretrain_gpt.multiplies_in_bf16", lambda _device: has_bf16)
    settings = parse_settings(options(tmp_path / "nothing", tmp_path, train__precision=precision))
    with pytest.raises(DataError):  # there is no corpus
        pretrain(settings, World(0, 1, 0, 1, torch.device("cpu")))
    said = [f"train.precision={precision} is slow on this CPU; choose {best}"] if best else []
    assert [record.getMessage() for record in caplog.records if "precision" in record.getMessage()] == said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero__stage": 3, "zero__units": "[heads.*]"}, r"zero.units=heads.\* matches none of the \d+ modules"),
        ({"offload__mode": "auto"}, "offload.mode=auto on cpu .*; set offload.accelerator_memory_gb"),
        ({"offload__mode": "host", "offload__states": "[parameters]"}, r"states=\[parameters\] .* zero.stage=2"),
        (
            {"offload__mode": "host", "model__hidden_size": 65536, "model__num_layers": 100},
            r"in the memory of this node .1 ranks.: offload.mode=host [\d,.]+ GB of model states; [\d,.]+ GB are free",
        ),
        ({"run__dir": "x" * 5000}, "run.dir=xxx.* 3000 bytes, .* 255"),
        ({"offload__accelerator_memory_gb": 1e-6}, "offload.accelerator_memory_gb=1e-06 is too small.* zero.units"),
        ({"config": "/nowhere.yaml"}, "/nowhere.yaml cannot be read .No such file or directory."),
        ({"parallel__tensor_size": 3}, "parallel.tensor_size=3 does not divide the 1 ranks of a node"),
        ({"activations__store": "partition"}, "^activations.store=partition: no 2 tensor ranks .*; choose keep or"),
        ({"data__path": "/nowhere/corpus"}, "/nowhere/corpus"),
        ({"checkpoint__resume": "/nowhere"}, "checkpoint.resume=/nowhere holds no complete checkpoint"),
        ({"run__dir": "/proc/run"}, r"run.dir=/proc/run cannot be written"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_in_settings_are_explained_in_one_line(corpus, tmp_path, settings, message):
    with pytest.raises((ConfigError, DataError), match=message) as raised:
        pretrain(parse_settings(options(corpus, tmp_path / "run", **settings)), start_world())
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("suffix", "kept"), [(".bin", 0.5), (".idx", 0), (".tokenizer.json", 0.9)])
def test_damaged_data_is_named(corpus, tmp_path, suffix, kept):
    for kind in (".bin", ".idx", ".json", ".tokenizer.json"):
        shutil.copy(f"{corpus}{kind}", tmp_path / f"copy{kind}")
    damaged = tmp_path / f"copy{suffix}"
    os.truncate(damaged, int(kept * damaged.stat().st_size))
    with pytest.raises(DataError, match=re.escape(str(damaged))):
        pretrain(parse_settings(options(tmp_path / "copy", tmp_path / "run")), start_world())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("layout.json", {}, "{newest}/layout.json cannot be read.*--checkpoint.resume={before}"),
        ("rank-00001.safetensors", {}, "{newest}/rank-00001.safetensors is damaged.*--checkpoint.resume={before}"),
        ("", {"model__hidden_size": 16}, "another model: token_embedding.weight is .384, 32. there and .384, 16."),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_named_and_nothing_is_touched(
    checkpoints, tmp_path, name, settings, message
):
    run_dir = shutil.copytree(checkpoints.run_dir, tmp_path / "run")
    newest, before = (run_dir / "checkpoints" / f"step-0000000{step}" for step in (6, 3))
    if name == "layout.json":
        (newest / name).unlink()
    elif name:
        flip_a_bit(newest / name)
    before_the_attempt = contents(run_dir)
    with pytest.raises(ConfigError, match=message.format(newest=newest, before=before)):
        pretrain(parse_settings(options(checkpoints.corpus, run_dir, train__steps=9, **settings)), start_world())
    assert contents(run_dir) == before_the_attempt


@pytest.mark.full
def test_damage_that_one_rank_finds_is_printed_once(checkpoints, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(checkpoints.run_dir, run_dir)
    file = run_dir / "checkpoints" / "step-00000006" / "rank-00001.safetensors"
    flip_a_bit(file)
    before_the_attempt = contents(run_dir)
    arguments = options(checkpoints.corpus, run_dir, train__steps=9)
    assert_told_once(arguments, rf"{file} is damaged.*--checkpoint.resume=.*step-00000003")
    assert contents(run_dir) == before_the_attempt


@dataclass(frozen=True)
class Checkpoints:
    corpus: Path
    run_dir: Path


@pytest.fixture(scope="module")
def checkpoints(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return the checkpoints of two ranks after 3 and 6 steps."""
    run_dir = tmp_path_factory.mktemp("checkpoints") / "run"
    run_ranks(2, run_on_rank, options(corpus, run_dir, checkpoint__every=3), init_process_group=False)
    return Checkpoints(corpus, run_dir)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 1
    file.write_bytes(content)


@pytest.mark.full
def test_a_mistake_that_all_ranks_see_is_printed_once(corpus, tmp_path):
    arguments = options(corpus, tmp_path / "run", train__global_batch_size=6)
    assert_told_once(arguments, r"train.global_batch_size=6 is not divisible by .* = 4; choose 8")
    assert not (tmp_path / "run").exists()


def test_the_error_of_one_rank_is_printed_and_the_other_rank_ends_without_one(tmp_path):
    """One rank gets a sample with an id outside the vocabulary, while the other waits for it in a collective."""
    with IndexedWriter(tmp_path / "bad", np.dtype(np.uint16)) as writer:
        for number in range(200):
            writer.add(np.full(17, 5000 if number % 100 == 99 else 7, dtype=np.uint16), np.array([17]))
    settings = {"train__global_batch_size": 4, "train__eval_samples": 0, "train__steps": 50}
    arguments = options(tmp_path / "bad", tmp_path / "run", **settings)
    assert_told_once(arguments, r"token id 5000 in sample \d+ .*bad.bin.* is outside model.vocab_size=300")


def assert_told_once(arguments: list[str], message: str) -> None:
    """Run the program on two ranks, and check what they and their launcher write to stderr until it has ended."""
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    errors = run_python(*torchrun, "pretrain_gpt.py", *arguments).stderr
    told = re.findall(r"^error: .*", errors, re.MULTILINE)
    assert len(told) == 1, errors
    assert re.search(message, told[0]), told[0]
    assert re.search(r"exitcode\s*: 2", errors)
    assert "RuntimeError" not in errors
    assert "Error: " not in errors.replace("ChildFailedError: ", "")
