"""Mistakes that a user can correct: one line with setting, numbers and remedy, exit code 2, and no traceback."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.staging import IndexedWriter
from gpt.settings.parser import parse_settings
from lab.faults.damage import flip_bit
from parallel.validation.errors import ConfigError
from parallel.world import World, start_world
from pretrain_gpt import pretrain
from tests.end_to_end.runs import options, run_on_rank, said_by, started_ranks
from tests.programs import run_program, run_python, wait_for_end
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


def test_damage_that_one_rank_finds_is_printed_once_and_nothing_is_touched(corpus, tmp_path):
    run_dir = tmp_path / "run"
    arguments = options(corpus, run_dir, checkpoint__every=3)
    run_ranks(2, run_on_rank, arguments, init_process_group=False)
    file = run_dir / "checkpoints" / "step-00000006" / "rank-00001.safetensors"
    flip_bit(file)
    before_the_attempt = contents(run_dir)
    said = said_by_ranks(tmp_path, [*arguments, "--train.steps=9"])
    assert_told_once(said, rf"{file} is damaged.*--checkpoint.resume=.*step-00000003")
    assert contents(run_dir) == before_the_attempt


def test_the_error_of_one_rank_is_printed_and_the_other_rank_ends_without_one(tmp_path):
    """One rank gets a sample with an id outside the vocabulary, while the other waits for it in a collective."""
    with IndexedWriter(tmp_path / "bad", np.dtype(np.uint16)) as writer:
        for number in range(200):
            writer.add(np.full(17, 5000 if number % 100 == 99 else 7, dtype=np.uint16), np.array([17]))
    settings = {"train__global_batch_size": 4, "train__steps": 50}
    arguments = options(tmp_path / "bad", tmp_path / "run", **settings)
    assert_told_once(
        said_by_ranks(tmp_path, arguments), r"token id 5000 in sample \d+ .*bad.bin.* is outside model.vocab_size=300"
    )


def said_by_ranks(folder: Path, arguments: list[str]) -> str:
    """Start two ranks, which end with the code of a mistake; return what they print."""
    with started_ranks(folder, run_program, "pretrain_gpt.py", *arguments) as ranks:
        assert [wait_for_end(rank) for rank in ranks] == [2, 2]
    return "".join(said_by(folder, rank).read_text() for rank in range(2))


@pytest.mark.full
def test_a_mistake_that_all_ranks_see_is_printed_once(corpus, tmp_path):
    arguments = options(corpus, tmp_path / "run", train__global_batch_size=6)
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    said = run_python(*torchrun, "pretrain_gpt.py", *arguments).stderr
    assert_told_once(said, r"train.global_batch_size=6 is not divisible by .* = 4; choose 8")
    assert re.search(r"exitcode\s*: 2", said)
    assert not (tmp_path / "run").exists()


def assert_told_once(said: str, message: str) -> None:
    """Check what ranks have printed, and their launcher if there is one."""
    told = re.findall(r"^error: .*", said, re.MULTILINE)
    assert len(told) == 1, said
    assert re.search(message, told[0]), told[0]
    assert "RuntimeError" not in said
    assert "Error: " not in said.replace("ChildFailedError: ", "")
