"""The weights of a wrapped module in a new folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from parallel.errors import ConfigError
from parallel.mesh import Axis
from zero.engine import ZeroDataParallel
from zero.partition.config import ZeroConfig
from zero.state.export import WeightFiles, export


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_values_are_written_in_the_type_that_is_asked_for_and_counters_in_their_own(tmp_path: Path, dtype):
    module = nn.BatchNorm1d(4)
    nn.init.uniform_(module.weight)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    (tmp_path / "weights").mkdir()  # a folder without files is as none
    export(tmp_path / "weights", ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(3)), dtype=dtype)
    (file,) = (tmp_path / "weights").glob("*.safetensors")
    written = load_file(file)
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        assert written[name].dtype == (dtype or torch.float32 if value.is_floating_point() else torch.int64)
        assert written[name].equal(value.to(written[name].dtype))


def test_files_are_as_large_as_they_may_be_and_found_by_their_index(tmp_path: Path):
    folder, numels = tmp_path / "new" / "weights", {"large": 9, "a": 2, "b": 2, "c": 1}
    writer = WeightFiles(folder, file_bytes=16)
    for name, numel in numels.items():
        values = torch.full((numel,), float(numel))
        writer.add(name, values)
        values.zero_()  # its memory is used for others
    writer.finish()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index == {
        "metadata": {"total_size": 4 * sum(numels.values())},
        "weight_map": dict(zip(numels, [names[0], names[1], names[1], names[2]], strict=True)),
    }
    assert sorted(path.name for path in folder.iterdir()) == [*names, "model.safetensors.index.json"]
    for name, file in index["weight_map"].items():
        assert load_file(folder / file)[name].tolist() == [numels[name]] * numels[name]
    with pytest.raises(ConfigError, match=r"holds \.safetensors files already; choose another folder"):
        WeightFiles(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").touch()
    WeightFiles(tmp_path / "other")
