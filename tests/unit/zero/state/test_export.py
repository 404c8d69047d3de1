"""The weights of a wrapped module in a new folder, and its whole state in memory."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.checkpoint.export import export, full_state_dict, write_folder
from zero.data_parallel import ZeroDataParallel
from zero.settings.config import ZeroConfig


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

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, numel in numels.items():
            values = torch.full((numel,), float(numel))
            yield name, values
            values.zero_()  # its memory is used for others

    write_folder(folder, tensors(), file_bytes=16)
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
        write_folder(folder, [])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").touch()
    write_folder(tmp_path / "other", [])


class Counted(nn.BatchNorm1d):
    """A layer with parameters, buffers, and a state that is not a tensor."""

    def get_extra_state(self) -> Any:
        return "extra"

    def set_extra_state(self, state: Any) -> None: ...


def test_the_full_state_is_that_of_the_module_in_memory_of_its_own():
    model = ZeroDataParallel(Counted(3), Axis.trivial("data"), ZeroConfig(1))
    model.module.register_parameter("added", nn.Parameter(torch.arange(2.0)))  # after the module was wrapped
    expected = copy.deepcopy(model.module.state_dict())
    found = full_state_dict(model)
    assert [*found] == [*expected]
    assert found.pop("_extra_state") == expected.pop("_extra_state") == "extra"
    for name, value in found.items():
        assert type(value) is torch.Tensor
        assert value.equal(expected[name])
        value.fill_(7)
    assert all(value.equal(expected[name]) for name, value in model.module.state_dict().items() if name in expected)
