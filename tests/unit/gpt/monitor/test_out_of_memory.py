"""A failed allocation, or a limit of memory, ends a run with one line, and leaves a table and a GPU's snapshot."""

import json
from pathlib import Path

import pytest
import torch

from gpt.monitor import out_of_memory
from gpt.settings.parser import parse_settings
from parallel.validation.errors import MemoryLimitError
from parallel.world import World
from tests.unit.gpt.settings.test_settings import BASE

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def record(run_dir: Path, device: torch.device, error: Exception) -> None:
    """Raise the error on rank 3, before anything has been built."""
    settings = parse_settings([f"--config={BASE}", f"--run.dir={run_dir}"])
    with out_of_memory.out_of_memory_recorded(settings, World(3, 4, 1, 2, device), lambda: None, lambda: 7):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nDetails follow"),
        RuntimeError("NCCL error: Cuda failure 'out of memory'"),
        MemoryError("Unable to allocate 3 GiB"),
    ],
)
def test_a_failed_allocation_is_told_in_one_line_that_names_the_table(tmp_path, error):
    with pytest.raises(MemoryLimitError) as caught:
        record(tmp_path, CPU, error)
    table = tmp_path / "out_of_memory" / "rank-3.txt"
    assert str(caught.value).startswith("rank 3 ran out of memory after step 7")
    assert str(table) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert table.read_text().splitlines()[0] == str(error).partition("\n")[0]
    assert [path.name for path in table.parent.iterdir()] == ["rank-3.txt"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["out_of_memory"]


def test_a_limit_of_the_settings_keeps_its_own_words(tmp_path):
    with pytest.raises(MemoryLimitError, match=r"^accelerator_memory_gb=1 cannot be kept; .*rank-3.txt says what"):
        record(tmp_path, CPU, MemoryLimitError("accelerator_memory_gb=1 cannot be kept"))


def test_a_gpu_leaves_a_snapshot_too(tmp_path, monkeypatch):
    snapshots: list[Path] = []
    monkeypatch.setattr(out_of_memory, "memory_snapshot", snapshots.append)
    monkeypatch.setattr(out_of_memory, "peak_memory", {GPU: {"peak_allocated_bytes": 10**9}}.get)
    with pytest.raises(MemoryLimitError, match=r"1\.00 GB at peak"):
        record(tmp_path, GPU, torch.OutOfMemoryError("CUDA out of memory"))
    assert snapshots == [tmp_path / "out_of_memory" / "rank-3.pickle"]


def test_other_errors_pass(tmp_path):
    with pytest.raises(RuntimeError, match="shapes do not agree"):
        record(tmp_path, CPU, RuntimeError("shapes do not agree"))
    assert list(tmp_path.iterdir()) == []
