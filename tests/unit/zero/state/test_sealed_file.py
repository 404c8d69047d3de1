"""Files with a checksum: any change of a byte or of the length is noticed, and safetensors reads the same tensors."""

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from parallel.validation.errors import ConfigError
from tests.programs import files_of_at_most
from zero.checkpoint import sealed_file, tensor_file
from zero.checkpoint.sealed_file import flush_folder, verify, write_json
from zero.checkpoint.tensor_file import TensorFile, write_tensors

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
    monkeypatch.setattr(sealed_file, "CHUNK_BYTES", 64)
    seal = write_tensors(tmp_path / "a", TENSORS, {"format": "pt"})
    assert verify(tmp_path / "a") == seal
    assert seal.num_bytes == (tmp_path / "a").stat().st_size
    found = safetensors.torch.load_file(tmp_path / "a")
    assert found.keys() == TENSORS.keys()
    file = TensorFile(tmp_path / "a")
    for name, tensor in TENSORS.items():
        for read in (found[name], file.tensor(name)):
            assert read.dtype == tensor.dtype
            assert read.equal(tensor)


def test_a_disk_without_room_is_noticed_before_anything_is_written(tmp_path):
    chunks: list[None] = []
    with files_of_at_most(300), pytest.raises(OSError, match="File too large"):
        write_tensors(tmp_path / "a", {"a": torch.zeros(1000)}, on_chunk=lambda: chunks.append(None))
    assert (chunks, (tmp_path / "a").read_bytes()) == ([], b"")


def test_any_range_is_read_into_any_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 16)
    write_tensors(tmp_path / "a", TENSORS)
    file, weights = TensorFile(tmp_path / "a"), TENSORS["weights"].flatten()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # cast in chunks of 16 bytes
        out = torch.empty(9, dtype=dtype)
        file.read("weights", range(4, 13), out)
        assert out.equal(weights[4:13].to(dtype))
    with pytest.raises(ConfigError, match="weights has 15 elements, 16 are needed"):
        file.read("weights", range(8, 16), torch.empty(8))


@pytest.mark.parametrize("kind", ["tensors", "json"])
def test_changed_bytes_and_truncations_are_noticed(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sealed_file, "CHUNK_BYTES", 2**11)  # a buffer of this size is made each time
    file = tmp_path / "file"
    write_tensors(file, TENSORS) if kind == "tensors" else write_json(file, {"step": 3, "names": ["a", "b"]})
    verify(file)
    whole = file.read_bytes()
    for offset in (*range(0, len(whole), 13), len(whole) - 1):
        changed = whole[:offset] + bytes([whole[offset] ^ 1 << offset % 8]) + whole[offset + 1 :]
        for damaged in (changed, whole[:offset]):
            file.write_bytes(damaged)
            with pytest.raises(ConfigError, match=rf"{file} is damaged"):
                verify(file)
    file.unlink()
    with pytest.raises(ConfigError, match=rf"{file} cannot be read: No such file"):
        verify(file)


def test_flushing_a_folder_leaves_no_file_open(tmp_path: Path):
    num_open = len(os.listdir("/proc/self/fd"))
    flush_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_open
