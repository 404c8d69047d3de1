"""A setting on the edge of its range is accepted, and the next number is refused by name, each alone."""

import pytest

from gpt.settings.parser import parse_settings
from parallel.errors import ConfigError

NEEDED = "{data: {path: nowhere}, model: {num_layers: 2, hidden_size: 32, num_heads: 4, seq_length: 16, vocab_size: 8}}"


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("checkpoint.every", 0),
        ("checkpoint.keep", 1),
        ("profile.collectives_step", 0),
        ("guard.check_replicas_every", 0),
        ("guard.max_roll_backs", 0),
        ("train.steps", 1),
        ("train.log_every", 1),
        ("train.eval_samples", 0),
        ("run.hang_seconds", 0),
    ],
)
def test_the_smallest_number_is_accepted_and_the_one_below_is_refused(name: str, smallest: int):
    group, _, field = name.partition(".")
    settings = parse_settings([f"--config={NEEDED}", f"--{name}={smallest}"])
    assert getattr(getattr(settings, group), field) == smallest
    with pytest.raises(ConfigError, match=rf"{name}={smallest - 1}\b"):
        parse_settings([f"--config={NEEDED}", f"--{name}={smallest - 1}"])
