"""Checkpoints of other formats are refused with both numbers."""

from pathlib import Path

import pytest

from gpt.checkpoint.layout import read_layout
from parallel.errors import ConfigError
from zero.state.layout_file import FORMAT, LAYOUT
from zero.state.sealed_file import write_json


@pytest.mark.parametrize("number", [1, FORMAT - 1, FORMAT + 1])
def test_any_other_format_is_refused_with_both_numbers(tmp_path: Path, number: int):
    write_json(tmp_path / LAYOUT, {"format": number, "state": {"buffers": []}})
    with pytest.raises(ConfigError, match=f"has format {number}, this program reads {FORMAT}"):
        read_layout(tmp_path)
