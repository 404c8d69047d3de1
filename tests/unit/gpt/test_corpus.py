"""The data of a run: what is logged of packed samples."""

import logging

import pytest

from gpt.corpus import _log_padding


@pytest.mark.parametrize(("filled", "level"), [(0.985, logging.WARNING), (0.995, logging.INFO)])
def test_more_than_a_hundredth_of_padding_is_a_warning(caplog: pytest.LogCaptureFixture, filled: float, level: int):
    with caplog.at_level(logging.INFO):
        _log_padding("training", filled)
    (record,) = caplog.records
    assert record.levelno == level
    assert f"training: {100 * (1 - filled):.3f}% of the positions" in record.getMessage()
    assert ("raise model.seq_length" in record.getMessage()) == (level == logging.WARNING)
