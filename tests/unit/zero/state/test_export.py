"""The weights of a wrapped module in a new folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from parallel.mesh import Axis
from zero.config import ZeroConfig
from zero.engine import ZeroDataParallel
from zero.state.export import export


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_values_are_written_in_the_type_that_is_asked_for_and_counters_in_their_own(tmp_path: Path, dtype):
    module = nn.BatchNorm1d(4)
    nn.init.uniform_(module.weight)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    export(tmp_path / "weights", ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(3)), dtype=dtype)
    (file,) = (tmp_path / "weights").glob("*.safetensors")
    written = load_file(file)
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        assert written[name].dtype == (dtype or torch.float32 if value.is_floating_point() else torch.int64)
        assert written[name].equal(value.to(written[name].dtype))
