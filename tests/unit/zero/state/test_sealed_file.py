"""Files that notice any change: every byte, every length, and what safetensors itself reads of them."""

import pytest
import safetensors.torch
import torch

from parallel.errors import ConfigError
from zero.state import tensor_file
from zero.state.sealed_file import read_json, verify, write_json
from zero.state.tensor_file import TensorFile, write_tensors

TENSORS = {
    "counter": torch.tensor(7.0),
    "random": torch.arange(5, dtype=torch.uint8),
    "weights": torch.randn(3, 5, dtype=torch.float64),
    "half": torch.randn(4, 2, dtype=torch.bfloat16).t(),
    "none": torch.zeros(0),
    "flag": torch.tensor([True, False]),
}


def test_safetensors_reads_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 16)
    write_tensors(tmp_path / "a", TENSORS, {"format": "pt"})
    found = safetensors.torch.load_file(tmp_path / "a")
    assert found.keys() == TENSORS.keys()
    file = TensorFile(tmp_path / "a")
    for name, tensor in TENSORS.items():
        for read in (found[name], file.tensor(name)):
            assert read.dtype == tensor.dtype
            assert read.equal(tensor)


def test_any_stretch_is_read_into_any_type(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 16)
    write_tensors(tmp_path / "a", TENSORS)
    file, weights = TensorFile(tmp_path / "a"), TENSORS["weights"].flatten()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        out = torch.empty(9, dtype=dtype)
        file.read("weights", range(4, 13), out)
        assert out.equal(weights[4:13].to(dtype))
    with pytest.raises(ConfigError, match="weights has 15 elements, 16 are needed"):
        file.read("weights", range(8, 16), torch.empty(8))


def test_json_comes_back(tmp_path):
    content = {"step": 3, "name": "x", "list": [1, 2.5, None]}
    write_json(tmp_path / "a.json", content)
    found = read_json(tmp_path / "a.json")
    assert len(found.pop("crc32")) == 8
    assert found == content


@pytest.mark.parametrize("kind", ["tensors", "json"])
def test_every_changed_byte_and_every_cut_is_noticed(tmp_path, kind):
    file = tmp_path / "file"
    write_tensors(file, TENSORS) if kind == "tensors" else write_json(file, {"step": 3, "names": ["a", "b"]})
    verify(file)
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 32):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(ConfigError, match=rf"{file} is damaged"):
                verify(file)
        file.write_bytes(whole[:place])
        with pytest.raises(ConfigError, match=rf"{file} is damaged"):
            verify(file)
    file.unlink()
    with pytest.raises(ConfigError, match=rf"{file} cannot be read: No such file"):
        verify(file)
