"""The settings that DeepSpeed's configurations stand for, and what is said of them, are as recorded."""

import json
import logging
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gpt.settings.parser import parse_settings
from tests.recordings import assert_recorded, lines_of
from tests.unit.gpt.deepspeed.test_config import BASE, ROOT

FILES = {file.stem: json.loads(file.read_text()) for file in sorted((ROOT / "configs/deepspeed").glob("*.json"))}
EVERYTHING = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 7,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.2}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-4, "warmup_num_steps": 10, "total_num_steps": 100},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_bucket_size": 5e6,
        "reduce_bucket_size": 5e6,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 2,
    },
    "tensorboard": {"enabled": True},
}
FILES |= {"everything": EVERYTHING}


@pytest.mark.parametrize("name", FILES)
def test_a_translation_is_as_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps(FILES[name]))
    console = Console(file=StringIO(), width=200)
    options = "--zero.deepspeed_config=ds_config.json", "--train.micro_batch_size=2"
    with caplog.at_level(logging.INFO):
        settings = parse_settings([*BASE, *options], 4, console.print)
    values = {key: value for key, value in asdict(settings).items() if key != "model"}
    assert_recorded(f"deepspeed-{name}", console.file.getvalue(), *caplog.messages, *lines_of(values))
