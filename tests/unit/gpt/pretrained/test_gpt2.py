"""GPT-2 against transformers as the reference, whose files are read and written."""

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from gpt.pretrained.families import config_from_transformers, config_to_transformers
from gpt.pretrained.tensors import load_weights
from gpt.pretrained.weights import load_pretrained, read_pretrained, write_weights
from parallel.errors import ConfigError
from tests.pretrained_weights import weights_from_transformers, weights_to_transformers, write_pretrained
from tests.unit.gpt.model.models import batch, small_config, small_gpt


def small_gpt2() -> GPT2LMHeadModel:
    """Return a small GPT-2 whose parameters, biases included, are so large that a misplaced one changes the logits."""
    model = GPT2LMHeadModel(config_to_transformers(small_config())).double().eval()
    for param in model.parameters():
        torch.nn.init.normal_(param, 0, 0.3)
    return model


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_weights_of_transformers_give_its_logits(attention):
    theirs, ours = small_gpt2(), small_gpt(small_config(attention=attention))
    load_weights(ours, weights_from_transformers(theirs.state_dict(), small_config()))
    tokens, _ = batch(small_config())
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)


def test_dropout_drops_the_same_elements_as_in_transformers():
    config = small_config(attention="math", dropout=0.1)
    theirs = GPT2LMHeadModel._from_config(config_to_transformers(config), attn_implementation="eager").double().train()
    ours = small_gpt(config)
    load_weights(ours, weights_from_transformers(theirs.state_dict(), small_config()))
    (tokens, _), logits = batch(config), []
    for run in (lambda: ours(tokens), lambda: theirs(tokens).logits):
        torch.manual_seed(7)
        logits.append(run())
    torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-10)


def test_a_model_without_its_head_and_with_stored_masks_is_read_too():
    theirs = small_gpt2()
    weights = {**theirs.transformer.state_dict(), "h.0.attn.bias": torch.ones(1), "h.0.attn.masked_bias": torch.ones(1)}
    expected = weights_from_transformers(theirs.state_dict(), small_config())
    ours = weights_from_transformers(weights, small_config())
    assert ours.keys() == expected.keys() == small_gpt(small_config()).state_dict().keys()
    assert all(ours[name].equal(expected[name]) for name in ours)


def test_our_weights_are_unchanged_by_a_conversion_and_back():
    ours = small_gpt(small_config(vocab_multiple=1)).state_dict()
    back = weights_from_transformers(weights_to_transformers(ours, small_config(vocab_multiple=1)), small_config())
    assert back.keys() == ours.keys()
    assert all(back[name].equal(ours[name]) for name in ours)


def test_a_written_folder_opens_in_transformers_with_our_logits(tmp_path):
    config = small_config()
    ours, (tokens, _) = small_gpt(config).eval(), batch(config)
    write_pretrained(tmp_path, config, ours.state_dict())
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-10, atol=1e-10)


def test_large_weights_are_written_and_read_in_several_files(tmp_path):
    config = small_config()
    ours, (tokens, _) = small_gpt(config).eval(), batch(config)
    write_weights(tmp_path, config, ours.state_dict().items(), file_bytes=50_000)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 5
    assert max(file.stat().st_size for file in files) < 60_000
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-10, atol=1e-10)
    again = small_gpt(config, seed=2)
    load_pretrained(again, tmp_path)
    torch.testing.assert_close(again.state_dict(), ours.state_dict(), rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"holds \.safetensors files already"):
        write_weights(tmp_path, config, [])


def test_weights_of_another_shape_are_refused(tmp_path):
    write_pretrained(tmp_path, small_config(), small_gpt(small_config()).state_dict())
    with pytest.raises(ConfigError, match=r"model.num_layers=2, but .* has 5; choose model.num_layers=5"):
        load_pretrained(small_gpt(small_config(num_layers=2)), tmp_path)


def test_a_folder_that_transformers_wrote_in_several_files_is_read(tmp_path):
    theirs, (tokens, _) = small_gpt2(), batch(small_config())
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config, weights = read_pretrained(tmp_path)
    assert config == small_config()
    ours = small_gpt(config)
    load_weights(ours, weights)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)


def test_the_default_gpt2_is_the_smallest_published_one():
    config = config_from_transformers(GPT2Config())
    assert (config.num_layers, config.hidden_size, config.num_heads) == (12, 768, 12)
    assert (config.seq_length, config.vocab_size, config.dropout) == (1024, 50257, 0.1)
    assert config_from_transformers(config_to_transformers(config)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function=relu, only gelu_new is supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True, only False is supported"),
        ({"embd_pdrop": 0.3}, "embd_pdrop=0.3, only 0.1 is supported"),
    ],
)
def test_a_variant_that_we_do_not_compute_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_transformers(transformers.GPT2Config(**changes))


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds 0 .safetensors files"):
        read_pretrained(tmp_path)
