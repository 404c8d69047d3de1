"""Checkpoints of earlier formats: the last one is read, others are refused with both numbers."""

from pathlib import Path

import pytest

from gpt.checkpoint.checkpoint import FORMAT, LAYOUT, read_layout
from parallel.errors import ConfigError
from zero.state.sealed_file import write_json

BUFFER = {"numel": 64, "num_shards": 2, "spans": {"weight": [[4, 8], 0]}}


def test_the_format_before_is_read_with_todays_names(tmp_path: Path):
    write_json(tmp_path / LAYOUT, {"format": 2, "state": {"buffers": [BUFFER | {"window_numel": 32}]}})
    layout = read_layout(tmp_path)
    assert layout["format"] == FORMAT
    assert layout["state"]["buffers"] == [BUFFER | {"bucket_numel": 32}]


@pytest.mark.parametrize("number", [1, FORMAT + 1])
def test_any_other_format_is_refused_with_both_numbers(tmp_path: Path, number: int):
    write_json(tmp_path / LAYOUT, {"format": number, "state": {"buffers": []}})
    with pytest.raises(ConfigError, match=f"has format {number}, this program reads {FORMAT}"):
        read_layout(tmp_path)
