"""The shape of a model: what is read back from plain values, and what tensor ranks can divide."""

from contextlib import nullcontext
from dataclasses import asdict

import pytest

from gpt.shape.config import ModelConfig, RopeScaling, check_divides
from parallel.comm_log import CommLog
from parallel.mesh import Axis
from parallel.validation.errors import ConfigError

SIZES = {"num_layers": 2, "hidden_size": 48, "num_heads": 24, "seq_length": 8, "vocab_size": 250, "vocab_multiple": 1}


def test_a_shape_is_read_from_plain_values_and_what_is_missing_has_its_default():
    scaling = RopeScaling(factor=2.0, low_freq_factor=3.0, high_freq_factor=5.0, original_seq_length=64)
    config = ModelConfig(**SIZES, positions="rope", dropout=0.3, rope_scaling=scaling)
    assert ModelConfig.from_plain(asdict(config)) == config
    part = ModelConfig.from_plain({**SIZES, "rope_scaling": {"low_freq_factor": 3.0, "newer": 1}, "newer": 1})
    assert part == ModelConfig(**SIZES, rope_scaling=RopeScaling(low_freq_factor=3.0))


@pytest.mark.parametrize(
    ("tensor_size", "changes", "message"),
    [
        (2, {}, None),
        (3, {"vocab_size": 249}, None),
        (16, {"mlp_width": 64, "vocab_size": 256}, "model.num_heads=24"),
        (2, {"mlp_width": 65}, "the width of the MLP=65"),
        (2, {"vocab_size": 249}, "model.vocab_size rounded up to model.vocab_multiple=249"),
        (4, {"vocab_size": 249, "vocab_multiple": 8}, None),
        # Two ranks share each of two heads of keys and values, or each rank has two of eight.
        (4, {"vocab_size": 256, "num_kv_heads": 2}, None),
        (4, {"vocab_size": 256, "num_kv_heads": 8}, None),
        (4, {"vocab_size": 256, "num_kv_heads": 3}, "model.num_kv_heads=3"),
        (8, {"vocab_size": 256, "num_kv_heads": 12}, "model.num_kv_heads=12"),
    ],
)
def test_tensor_ranks_have_equal_parts(tensor_size: int, changes: dict[str, int], message: str | None):
    config, axis = ModelConfig(**{**SIZES, **changes}), Axis("tensor", tensor_size, 0, CommLog())
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_divides(config, axis)
