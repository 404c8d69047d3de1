"""Folders of initial weights: names, shapes, types and finiteness are checked, and the configuration is needed."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.pretrained.weights import load_pretrained, write_config
from gpt.settings.parser import parse_settings
from gpt.shape.config import ModelConfig, RopeScaling, parameter_shapes
from parallel.validation.errors import ConfigError
from tests.pretrained_weights import change_config, weights_to_transformers, write_pretrained
from tests.unit.gpt.model.models import VARIANTS, small_config, small_gpt
from zero.checkpoint.tensor_file import write_tensors

CONFIG = small_config(num_layers=2)


def test_shapes_of_a_configuration_are_those_of_the_model():
    for config in (CONFIG, *VARIANTS.values()):
        model = small_gpt(config)
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        assert dict(parameter_shapes(config, config.padded_vocab_size)) == shapes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pretrained(tmp_path, CONFIG, small_gpt(CONFIG).state_dict())
    return tmp_path


def assert_refused(folder: Path, message: str, dtype: torch.dtype = torch.float64) -> None:
    model = small_gpt(CONFIG, seed=2).to(dtype)
    with pytest.raises(ConfigError, match=message) as raised:
        load_pretrained(model, folder)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500
    assert str(folder) in str(raised.value)
    assert re.search("; (give|choose|copy|convert|correct|keep) ", str(raised.value)), "it says what to do"


NORM, QKV, TOKENS = "transformer.ln_f.weight", "transformer.h.1.attn.c_attn.weight", "transformer.wte.weight"
HEAD = "lm_head.weight"
Weights = dict[str, Tensor]


def change_weights(folder: Path, change: Callable[[Weights], object]) -> None:
    (file,) = folder.glob("*.safetensors")
    weights = weights_to_transformers(small_gpt(CONFIG).state_dict(), CONFIG)
    change(weights)
    write_tensors(file, {name: tensor.contiguous() for name, tensor in weights.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(NORM), "lacks the parameter ln_f.weight of its config"),
        (lambda w: w.update({"transformer.h.2.ln_1.bias": torch.zeros(24)}), "has 'h.2.ln_1.bias'"),
        (lambda w: w.update({NORM: torch.ones(1)}), r"ln_f.weight has the shape \[1\], .* \[24\]"),
        (lambda w: w.update({QKV: w[QKV].T.contiguous()}), r"c_attn.weight has the shape \[72, 24\], .* \[24, 72\]"),
        (lambda w: w.update({TOKENS: w[TOKENS].int()}), "has 'transformer.wte.weight' in torch.int32, floats"),
        (lambda w: w.update({"wte.weight": w[TOKENS]}), "has 'wte.weight' and .* has 'transformer.wte.weight'"),
        (lambda w: w.update({"lm_head.bias": torch.zeros(61)}), "has 'lm_head.bias', which is no parameter"),
        (lambda w: w[NORM].fill_(torch.nan), "final_norm.weight has 24 values that are not finite in .*float64"),
        (lambda w: w[QKV][0, :2].fill_(-torch.inf), "qkv.weight has 2 values that are not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, change: Callable[[Weights], object], message: str):
    change_weights(folder, change)
    assert_refused(folder, message)


def test_a_file_of_a_model_without_its_prefix_and_with_the_masks_of_older_files_is_read(folder: Path):
    def change(weights: Weights) -> None:
        masks = {f"h.{layer}.attn.{name}": torch.ones(1) for layer in (0, 1) for name in ("bias", "masked_bias")}
        names = {name: name.removeprefix("transformer.") for name in weights}
        for name, short in names.items():
            weights[short] = weights.pop(name)
        weights.update(masks, **{HEAD: weights["wte.weight"]})

    change_weights(folder, change)
    model, expected = small_gpt(CONFIG, seed=2), small_gpt(CONFIG)
    load_pretrained(model, folder)
    for param, own in zip(model.parameters(), expected.parameters(), strict=True):
        assert param.equal(own)


def test_weights_that_overflow_in_the_precision_of_the_run_are_refused(folder: Path):
    change_weights(folder, lambda weights: weights[NORM][3].fill_(1e6))
    load_pretrained(small_gpt(CONFIG), folder)
    assert_refused(folder, "has 1 values that are not finite in torch.float16", torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("n_layer"), "config.json is damaged: n_layer is missing"),
        (lambda c: c.update(n_layer="2"), "n_layer is '2', an integer from 1"),
        (lambda c: c.update(n_head=0), "n_head is 0, an integer from 1"),
        (lambda c: c.update(n_head=5), "config.json: model.hidden_size=24 is not divisible by model.num_heads=5"),
        (lambda c: c.update(n_layer=10**7), "lacks the parameter h.2.attn.c_attn.weight"),
        (lambda c: c.update(resid_pdrop=float("nan")), "resid_pdrop is nan, a finite number is needed"),
        (lambda c: c.update(resid_pdrop=2, embd_pdrop=2, attn_pdrop=2), "config.json: .*dropout=2.0 is not below 1"),
        (lambda c: c.update(activation_function="re\nlu"), r"activation_function='re\\nlu', only 'gelu_new'"),
        (lambda c: c.update(transformers_version=5, torch_dtype=[1]), None),
        (lambda c: [c.pop(name) for name in ("model_type", "scale_attn_weights", "resid_pdrop")], None),
    ],
)
def test_a_configuration_that_is_wrong_is_refused(folder: Path, change: Callable[[Any], object], message: str | None):
    change_config(folder, change)
    if message is None:
        # as the others; it was left out above, where the default is another
        change_config(folder, lambda content: content.update(resid_pdrop=0.0))
        load_pretrained(small_gpt(CONFIG, seed=2), folder)
    else:
        assert_refused(folder, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "config.json cannot be read: No such file"), (b"\xff{", "is not JSON"), (b"[" * 10**5, "is not JSON")],
    ids=range(3),
)
def test_a_configuration_that_is_missing_or_not_json_is_refused(folder: Path, content: bytes | None, message: str):
    (folder / "config.json").unlink() if content is None else (folder / "config.json").write_bytes(content)
    assert_refused(folder, message)


LLAMA = {"positions": "rope", "norm": "rms", "mlp": "swiglu", "biases": False, "dropout": 0.0}
SCALED = {"rope_theta": 5e5, "rope_scaling": RopeScaling(original_seq_length=32), "mlp_width": 96, "num_kv_heads": 2}


@pytest.mark.parametrize("parts", [{}, {**LLAMA, **SCALED, "tied_head": False}, {**LLAMA, "qk_norm": True}])
def test_settings_take_the_model_of_initial_weights_and_say_what_they_take(tmp_path, parts, caplog, monkeypatch):
    config = ModelConfig(2, 32, 4, 64, 100, **parts)
    write_config(tmp_path, config, None)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    options = ["--data.path=unread", "--train.micro_batch_size=1", "--train.global_batch_size=2"]
    options.append(f"--train.initial_weights={tmp_path}")
    shown = []
    model = parse_settings([*options, "--model.seq_length=16"], show=shown.append).model
    resolved = {"head_dim": model.head_dim, "mlp_width": model.mlp_width, "num_kv_heads": model.num_kv_heads}
    assert model == replace(config, seq_length=16, **resolved)
    sizes = [(of.head_size, of.mlp_size, of.kv_heads) for of in (model, config)]
    assert sizes[0] == sizes[1]
    (table,) = shown
    names = list(table.columns[0].cells)
    assert {"model.num_layers", "model.vocab_size"} <= set(names)
    assert "model.seq_length" not in names  # given, and so not taken
    assert not caplog.records, "transformers warns of special tokens of its own, which are not in this vocabulary"
