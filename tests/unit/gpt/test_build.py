"""The builder sets what holds for the whole process."""

import logging

import pytest
import torch

from gpt.build import build
from gpt.settings_parser import parse_settings
from parallel.errors import ConfigError
from parallel.mesh import Mesh

BASE = "{data: {path: nowhere}, model: {num_layers: 1, hidden_size: 8, num_heads: 2, seq_length: 4, vocab_size: 64}}"


def test_the_precision_of_fp32_products_is_set_and_logged(caplog):
    caplog.set_level(logging.INFO)
    for arguments, expected in [(["--train.float32_matmul_precision=high"], "high"), ([], "highest")]:
        build(parse_settings([f"--config={BASE}", *arguments]), Mesh.create(1), torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == expected
        assert f"products of fp32: {expected} precision" in caplog.messages
    with pytest.raises(ConfigError, match=r"train\.float32_matmul_precision"):
        parse_settings([f"--config={BASE}", "--train.float32_matmul_precision=low"])
