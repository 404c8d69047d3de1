"""The sizes and FLOPs of the configurations in this repository are as recorded."""

import dataclasses
from pathlib import Path

import pytest

from gpt.settings.parser import parse_settings
from gpt.shape.config import ModelConfig
from gpt.shape.flops import hardware_flops, model_flops
from tests.recordings import assert_recorded, lines_of

ROOT = Path(__file__).resolve().parents[4]
FILES = "gpt/*.yaml", "models/llama-3-*.yaml", "paper/[0-9t]*.yaml"
VARIANTS = {
    "grouped": {"num_heads": 8, "num_kv_heads": 2, "positions": "rope", "mlp": "swiglu"},
    "norms of heads": {"num_heads": 8, "num_kv_heads": 4, "positions": "rope", "qk_norm": True},
    "wide heads": {"num_heads": 4, "head_dim": 32, "mlp_width": 100, "attention": "math"},
    "muP": {"num_heads": 8, "mup_base_width": 32, "mup_base_head_dim": 4, "vocab_multiple": 1},
}
PROPERTIES = sorted(name for name, value in vars(ModelConfig).items() if isinstance(value, property))


def figures(config: ModelConfig) -> dict[str, object]:
    executed = {recomputes: hardware_flops(config, 2, recomputes) for recomputes in ("nothing", "attention", "blocks")}
    own = {name: getattr(config, name) for name in PROPERTIES}
    return own | {"model_flops": model_flops(config, 2), "hardware_flops": executed}


def test_the_figures_of_all_models_are_as_recorded():
    found = {}
    for file in sorted(file for pattern in FILES for file in (ROOT / "configs").glob(pattern)):
        found[file.stem] = figures(parse_settings([f"--config={file}"]).model)
    assert_recorded("models", *lines_of(found))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_figures_of_variants_are_as_recorded(name: str):
    config = ModelConfig(num_layers=3, hidden_size=64, num_heads=4, seq_length=128, vocab_size=1000)
    found = figures(dataclasses.replace(config, **VARIANTS[name]))
    assert_recorded(f"model-{name.replace(' ', '-')}", *lines_of(found))
