"""GPT-2, Llama, Qwen 3 and Mistral against transformers as the reference, whose files are read and written."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from gpt.builder.closed_forms import parameters_of_rank
from gpt.pretrained.configuration import config_to_transformers, family_of
from gpt.pretrained.tensors import load_weights
from gpt.pretrained.weights import load_pretrained, read_pretrained, write_weights
from gpt.settings.parser import parse_settings
from gpt.shape.config import ModelConfig, RopeScaling, check_divides, parameter_shapes
from parallel.comm_log import CommLog
from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from tests.models import rms_norm
from tests.pretrained_weights import change_config, weights_from_transformers, write_pretrained
from tests.unit.gpt.model.models import MODELS, SIZES, batch, preset_config, small_config, small_gpt

NORMS = (
    *(modeling_llama.LlamaRMSNorm, modeling_mistral.MistralRMSNorm),
    *(modeling_qwen2.Qwen2RMSNorm, modeling_qwen3.Qwen3RMSNorm),
)


@pytest.fixture(autouse=True)
def norms_in_the_dtype_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for norm in NORMS:
        monkeypatch.setattr(norm, "forward", rms_norm)


def model_of_transformers(config: ModelConfig, name: str) -> nn.Module:
    """Return a model whose parameters are so large that a misplaced one changes the logits."""
    theirs = config_to_transformers(config)
    if name == "mistral":  # it is written as a Llama, which it is
        theirs = transformers.MistralConfig(**{**theirs.to_dict(), "sliding_window": None, "model_type": "mistral"})
    model = transformers.AutoModelForCausalLM.from_config(theirs).double().train()
    for param in model.parameters():
        nn.init.normal_(param, 0, 0.3)
    return model


@pytest.mark.parametrize("name", SIZES)
def test_losses_and_gradients_of_five_steps_are_those_of_transformers(name):
    config = preset_config(name)
    theirs, ours = model_of_transformers(config, name), small_gpt(config)
    load_weights(ours, weights_from_transformers(theirs.state_dict(), config))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (ours, theirs)]
    for _ in range(5):
        tokens, targets = batch(config)
        loss = ours(tokens, targets)
        expected = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        loss.backward()
        expected.backward()
        theirs_by_name = {key: param.grad for key, param in theirs.named_parameters()}
        gradients = weights_from_transformers(theirs_by_name, config)
        for key, param in ours.named_parameters():
            grad = param.grad[: config.vocab_size] if key in ("token_embedding.weight", "head.weight") else param.grad
            torch.testing.assert_close(grad, gradients[key], rtol=1e-9, atol=1e-10, msg=key)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", SIZES)
def test_a_folder_of_several_files_is_written_and_read_without_a_change(name, tmp_path):
    config = preset_config(name)
    ours, (tokens, _) = small_gpt(config).eval(), batch(config)
    write_weights(tmp_path, config, ours.state_dict().items(), file_bytes=50_000)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert max(file.stat().st_size for file in files) < 60_000
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-10, atol=1e-10)
    again = small_gpt(config, seed=2)
    load_pretrained(again, tmp_path)
    torch.testing.assert_close(again.state_dict(), ours.state_dict(), rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"holds \.safetensors files already"):
        write_weights(tmp_path, config, [])


@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=4.0, original_seq_length=8)])
@pytest.mark.parametrize("name", ["llama2", "qwen2", "qwen3"])
def test_a_configuration_has_its_rotary_base_by_the_names_of_transformers_4_and_5(name, scaling, tmp_path):
    config = preset_config(name, rope_theta=7e5, rope_scaling=scaling)
    write_weights(tmp_path, config, small_gpt(config).bfloat16().state_dict().items())
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["rope_theta"], content["torch_dtype"]) == (7e5, "bfloat16")
    expected, path = config_to_transformers(config).rope_parameters, tmp_path / "config.json"
    assert content["rope_scaling"] == (scaling and {key: expected[key] for key in expected if key != "rope_theta"})
    for left_out in ((), ("rope_parameters",), ("rope_theta", "rope_scaling")):
        path.write_text(json.dumps({key: value for key, value in content.items() if key not in left_out}))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert (theirs.rope_parameters, theirs.dtype) == (expected, torch.bfloat16)
        found, _ = read_pretrained(tmp_path)
        assert (found.rope_theta, found.rope_scaling) == (7e5, scaling)


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize(("name", "tied_head"), [("gpt2", True), *product(sorted({*SIZES} - {"gpt2"}), [False, True])])
def test_a_folder_that_transformers_wrote_is_read(name, tied_head, attention, tmp_path):
    config = preset_config(name, tied_head=tied_head, attention=attention)
    theirs, (tokens, _) = model_of_transformers(config, name), batch(config)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    found, weights = read_pretrained(tmp_path)
    assert dict(parameter_shapes(found, 97)) == dict(parameter_shapes(config, 97))
    ours = small_gpt(replace(found, attention=attention))
    load_weights(ours, weights)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)


def test_dropout_drops_the_same_elements_as_in_transformers():
    config = small_config(attention="math", dropout=0.1)
    theirs = transformers.GPT2LMHeadModel._from_config(config_to_transformers(config), attn_implementation="eager")
    theirs, ours = theirs.double().train(), small_gpt(config)
    load_weights(ours, weights_from_transformers(theirs.state_dict(), config))
    (tokens, _), logits = batch(config), []
    for run in (lambda: ours(tokens), lambda: theirs(tokens).logits):
        torch.manual_seed(7)
        logits.append(run())
    torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "expected"), [("1b", 1_235_814_400), ("3b", 3_212_749_824), ("8b", 8_030_261_248), ("70b", 70_553_706_496)]
)
def test_configurations_of_llama_3_have_the_published_numbers_of_parameters(name, expected):
    settings = parse_settings(["--config", str(MODELS / f"llama-3-{name}.yaml")])
    assert parameters_of_rank(settings.model, 1) == expected
    for tensor_size in (2, 8, 16 if expected > 4e9 else 4):  # in 16, keys and values of 8 heads are replicated
        check_divides(settings.model, Axis("tensor", tensor_size, 0, CommLog()))


ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": "8", "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}
REFUSED = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True, only False"),
    ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop=0.3, only 0.0"),
    *((name, {"is_causal": False}, "is_causal=False, only True") for name in ("gpt2", "llama", "qwen3")),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu', only 'silu'"),
    ("llama", {"attention_bias": True}, "attention_bias=True, only False"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True, only False"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1, only 0.0"),
    ("llama", {"attention_dropout": None}, "attention_dropout=None, only 0.0"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, only 1.0"),
    ("llama", {"model_type": "granite"}, "model_type='granite', only gpt2, llama, mistral, qwen2, qwen3 are sup"),
    ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn, only default and"),
    ("llama", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5, only 1.0"),
    ("llama", {"rope_parameters": LLAMA3_ROPE}, "config.json: RopeScaling.factor=8 is a text; choose a number"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"factor": 8}}, r'; choose model.rope_scaling={"factor": 8.0, "low_'),
    ("qwen2", {"rope_parameters": {"full_attention": ROPE}}, "rope_type=None, only default and llama3"),
    ("llama", {"num_attention_heads": 5}, "config.json"),
    ("llama", {"num_key_value_heads": 3}, "config.json"),
    ("llama", {"hidden_size": "64"}, "hidden_size is '64', an integer"),
    ("llama", {"rms_norm_eps": 1e-6}, "model.norm_eps=1e-05, but .* has 1e-06; choose model.norm_eps=1e-06"),
    ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings=true, and a lm_head.weight other than"),
    ("llama", {"max_position_embeddings": 8}, "model.seq_length=12, but .* has 8 positions, or a sliding window"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[next(iter(case[1])) for case in REFUSED])
def test_what_differs_is_refused_by_name(name, changes, message, tmp_path):
    config = preset_config(name, rope_scaling=None)
    write_pretrained(tmp_path, config, small_gpt(config).state_dict())
    change_config(tmp_path, lambda content: content.update(changes))
    with pytest.raises(ConfigError, match=message):
        load_pretrained(small_gpt(config), tmp_path)


def test_an_original_length_beside_the_rotary_parameters_replaces_the_one_in_them(tmp_path):
    config = preset_config("llama")
    write_pretrained(tmp_path, config, small_gpt(config).state_dict())
    longer = {"original_max_position_embeddings": 2 * config.rope_scaling.original_seq_length}
    change_config(tmp_path, lambda content: content.update(longer))
    found, weights = read_pretrained(tmp_path)
    load_weights(ours := small_gpt(found), weights)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    tokens, _ = batch(config)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)


def test_a_window_of_mistral_limits_the_sequences(tmp_path):
    config = preset_config("mistral")
    write_pretrained(tmp_path, config, small_gpt(config).state_dict())
    change_config(tmp_path, lambda content: content.update(model_type="mistral", sliding_window=8))
    load_pretrained(small_gpt(preset_config("mistral", seq_length=8)), tmp_path)
    with pytest.raises(ConfigError, match="has 8 positions, or a sliding window of as many"):
        load_pretrained(small_gpt(config), tmp_path)


def test_a_mistral_whose_window_is_null_has_none(tmp_path):
    gpt = small_gpt(config := preset_config("mistral", seq_length=4100))
    write_pretrained(tmp_path, config, gpt.state_dict())
    change_config(tmp_path, lambda content: content.update(model_type="mistral", sliding_window=None))
    load_pretrained(gpt, tmp_path)
    change_config(tmp_path, lambda content: content.pop("sliding_window"))
    with pytest.raises(ConfigError, match="has 4096 positions, or a sliding window of as many"):
        load_pretrained(gpt, tmp_path)


@pytest.mark.parametrize(
    ("name", "sizes", "kind"),
    [("llama", {"hidden_size": 30, "head_dim": 8}, "mistral"), ("gpt2", {"head_dim": 8}, "gpt2")],
)
def test_a_model_is_written_as_one_that_may_have_its_sizes(name, sizes, kind, tmp_path):
    ours = small_gpt(config := preset_config(name, **sizes))
    write_pretrained(tmp_path, config, ours.state_dict())
    theirs, (tokens, _) = transformers.AutoModelForCausalLM.from_pretrained(tmp_path), batch(config)
    assert (theirs.config.model_type, getattr(theirs.config, "sliding_window", None)) == (kind, None)
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-10, atol=1e-10)
    load_pretrained(small_gpt(config, seed=2), tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm": "rms"}, "model.norm=rms"),
        ({"tied_head": False}, "model.tied_head=false"),
        ({"num_kv_heads": 1}, "model.num_kv_heads=1"),
        ({"positions": "rope"}, "model.positions=rope"),
        ({"logit_cap": 30.0}, "model.logit_cap=30.0"),
        ({"mup_base_width": 24, "mup_base_head_dim": 2}, "model.mup_base_head_dim=2"),
    ],
)
def test_a_model_that_transformers_does_not_have_is_not_written(changes, named):
    with pytest.raises(ConfigError, match=rf"^no family of transformers that is supported has {named} beside"):
        family_of(small_config(**{"hidden_size": 24, "num_heads": 2, **changes}))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "residual_multiplier", 0.22),
        ("qwen3", "scale_attn_by_inverse_layer_idx", 2),
        ("qwen2", "attention_bias", True),
    ],
)
def test_a_key_that_changes_models_of_another_class_only_is_refused(name, key, value, tmp_path):
    config = preset_config(name)
    write_pretrained(tmp_path, config, small_gpt(config).state_dict())
    change_config(tmp_path, lambda content: content.update({key: value}))
    with pytest.raises(ConfigError, match=rf"the model has {key}={value}, which is no key of \w+Config"):
        read_pretrained(tmp_path)
    for neutral in (None, False, 1.0):
        change_config(tmp_path, lambda content, neutral=neutral: content.update({key: neutral}))
        read_pretrained(tmp_path)
