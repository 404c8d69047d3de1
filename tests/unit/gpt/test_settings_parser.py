"""The layers of settings: YAML files, then DeepSpeed's configuration, then options, in any order of arguments."""

from itertools import permutations
from pathlib import Path

import pytest

from gpt.settings import Settings
from gpt.settings_parser import parse_settings

BASE = "{data: {path: nowhere}, model: {num_layers: 2, hidden_size: 32, num_heads: 4, seq_length: 16, vocab_size: 300}}"
FILE = "{optimizer: {lr: 0.5, eps: 0.25, clip_norm: 7.0}}"


def optimizer_of(*arguments: str) -> tuple[float, float, float]:
    settings: Settings = parse_settings([f"--config={BASE}", *arguments])
    return settings.optimizer.lr, settings.optimizer.eps, settings.optimizer.clip_norm


@pytest.fixture
def deepspeed_option(tmp_path: Path) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text('{"gradient_clipping": 2.0, "optimizer": {"params": {"lr": 0.125}}}')
    return f"--zero.deepspeed_config={path}"


def test_a_later_file_wins_over_an_earlier_one():
    assert optimizer_of("--config", FILE, "--config={optimizer: {lr: 0.75}}") == (0.75, 0.25, 7.0)
    assert optimizer_of("--config={optimizer: {lr: 0.75}}", "--config", FILE) == (0.5, 0.25, 7.0)


def test_the_order_of_layers_is_not_that_of_the_command_line(deepspeed_option: str):
    for arguments in permutations([f"--config={FILE}", deepspeed_option, "--optimizer.clip_norm=3"]):
        assert optimizer_of(*arguments) == (0.125, 0.25, 3.0)
    for arguments in permutations([f"--config={FILE}", "--optimizer.clip_norm=3"]):
        assert optimizer_of(*arguments) == (0.5, 0.25, 3.0)


def test_an_option_of_a_group_gives_only_the_settings_that_it_names(deepspeed_option: str, tmp_path: Path):
    file = tmp_path / "group.yaml"
    file.write_text("{clip_norm: 3}")
    for option in (["--optimizer={clip_norm: 3}"], ["--optimizer", "{clip_norm: 3}"], [f"--optimizer={file}"]):
        assert optimizer_of(deepspeed_option, *option) == (0.125, 1e-8, 3.0)
