"""The settings and the compiler of compiled blocks."""

import shutil
from importlib.util import find_spec

import pytest
import torch

from gpt.model import compiled_blocks
from gpt.settings import TrainSettings
from parallel.errors import ConfigError


def test_a_part_that_cannot_be_compiled_is_refused():
    with pytest.raises(ConfigError, match=r"train.compile=model is unknown; choose none or blocks"):
        TrainSettings(compile="model")


@pytest.mark.parametrize(("device", "name"), [("cuda", "triton"), ("cpu", r"C\+\+")])
def test_a_compiler_that_is_not_installed_is_named(device: str, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_blocks, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(ConfigError, match=f"train.compile=blocks needs .*{name}"):
        compiled_blocks.check_compiler(torch.device(device))
