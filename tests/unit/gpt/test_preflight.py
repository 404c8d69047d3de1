"""The preflight of a training compares all its settings and its data, wherever they are set."""

import json

import pytest

from gpt.preflight import describe_job
from parallel.launch.node_facts import find_facts
from parallel.validation.errors import ConfigError

CONFIG = """
model: {num_layers: 1, hidden_size: 8, num_heads: 1, seq_length: 8, vocab_size: 8}
train: {steps: 5}
"""


def test_settings_and_data_are_found_in_files_and_options_alike(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.idx").write_text(name)
    config = tmp_path / "config.yaml"
    config.write_text(f"{CONFIG}data:\n  path: [0.3:{tmp_path / 'a'}, 0.7:{tmp_path / 'b'}]\n")
    arguments = ["--config", str(config), "--train.steps=7", f"--run.dir={tmp_path / 'not' / 'yet'}"]
    facts = find_facts(describe_job(arguments, num_ranks=None))
    assert "train.steps=7" in facts.settings
    assert "train.steps=5" not in facts.settings
    assert any(line.startswith("zero.stage=") for line in facts.settings), "defaults too"
    assert list(facts.data) == [str(tmp_path / "a.idx"), str(tmp_path / "b.idx")]
    assert "missing" not in facts.data.values()
    assert facts.disk == str(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.idx", "b.idx", "config.yaml"]


def test_the_same_settings_are_the_same_in_whatever_way_they_are_written(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    common = ["--config", str(config), "--data.path", "corpus"]
    assert describe_job([*common, "--train.steps", "5"], None) == describe_job(common, None)
    assert describe_job([*common, "--train.steps", "6"], None) != describe_job(common, None)


def test_settings_that_could_not_start_are_refused():
    with pytest.raises(ConfigError, match=r"model\.num_layers"):
        describe_job([], None)


def test_batch_sizes_of_deepspeed_are_for_the_ranks_of_the_job(tmp_path):
    config, deepspeed = tmp_path / "config.yaml", tmp_path / "ds_config.json"
    config.write_text(CONFIG)
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    deepspeed.write_text(json.dumps(sizes))
    arguments = ["--config", str(config), "--data.path=corpus", f"--zero.deepspeed_config={deepspeed}"]
    assert "train.global_batch_size=8" in describe_job(arguments, num_ranks=4).settings
    with pytest.raises(ConfigError, match="1 data-parallel ranks"):
        describe_job(arguments, num_ranks=1)
