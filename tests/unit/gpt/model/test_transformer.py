"""The model alone: loss, causality, the order of heads, initial values, refusals, the choice of LayerNorm."""

import math
import sys
from functools import partial

import pytest
import torch
from torch import nn

from gpt.kernels.apex import choose_norm
from gpt.kernels.attention import describe_attention
from gpt.model.transformer import Attention, Sequences, initialize
from gpt.shape.config import ModelConfig
from lab.observe.kernel_log import KernelLog
from lab.observe.operation_observer import observe_operations
from tests.unit.gpt.model.models import ONE_DEVICE, batch, small_config, small_gpt


def test_both_attention_kernels_give_the_same_gradients():
    (tokens, targets), gradients = batch(small_config()), []
    for attention in ("flash", "math"):
        model = small_gpt(small_config(attention=attention))
        model(tokens, targets).backward()
        gradients.append([param.grad for param in model.parameters()])
    for flash, math_ in zip(*gradients, strict=True):
        torch.testing.assert_close(flash, math_, rtol=1e-12, atol=1e-14)


def attention_layer(config: ModelConfig) -> Attention:
    layer = Attention(config, ONE_DEVICE).double()
    for param in layer.parameters():
        nn.init.normal_(param)
    return layer


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_attention_weights_are_dropped_in_training_only(attention):
    layer, x = attention_layer(small_config(dropout=0.5, attention=attention)), torch.randn(32, 24, dtype=torch.float64)
    assert not layer(x, Sequences(2)).equal(layer(x, Sequences(2)))
    layer.eval()
    assert layer(x, Sequences(2)).equal(layer(x, Sequences(2)))


def test_the_gradient_of_q_k_and_v_is_packed_by_one_copy():
    layer = attention_layer(small_config(attention="flash"))
    x = torch.randn(32, 24, dtype=torch.float64, requires_grad=True)
    y = layer(x, Sequences(2))
    kernels = KernelLog(lambda: "backward", is_on_host=lambda _tensor: False)
    with observe_operations(kernels):
        torch.autograd.grad(y, [x, *layer.parameters()], y.detach().cos())
    copied = [k.num_bytes for k in kernels.kernels if k.name in {"stack", "cat", "clone", "copy_"}]
    assert sum(copied) == 2 * 32 * 3 * 24 * 8


def test_the_log_names_the_attention_kernel():
    described = partial(describe_attention, tensor_size=1, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert "FlashAttention" in described(small_config(attention="flash", dropout=0.0))
    assert "no fused one" in described(small_config(attention="flash", dropout=0.1)), "the CPU's has no dropout"
    assert "explicit" in described(small_config(attention="math"))


def test_initial_values_depend_on_seed_and_name_not_on_construction_or_dtype():
    torch.manual_seed(5)
    whole, rounded = small_gpt(small_config()).float(), small_gpt(small_config(num_layers=5)).bfloat16()
    for module in rounded.modules():
        module._parameters = dict(reversed(module._parameters.items()))
    initialize(whole, seed=3)
    initialize(rounded, seed=3)
    reinitialized = {name: param.clone() for name, param in whole.named_parameters()}
    for name, param in rounded.named_parameters():
        assert param.equal(reinitialized[name].bfloat16())
    initialize(whole, seed=4)
    assert not whole.token_embedding.weight.equal(reinitialized["token_embedding.weight"])


def test_initial_values_have_gpt2s_spread():
    config = small_config(hidden_size=192, vocab_size=500)
    values = dict(small_gpt(config).named_parameters())
    for name, param in values.items():
        if name.endswith("bias"):
            assert param.eq(0).all()
        elif "norm" in name:
            assert param.eq(1).all()
        else:
            param = param[:500]  # the rest of the token embedding is padding
            is_residual = name.endswith(("projection.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * config.num_layers) if is_residual else 0.02
            # The standard deviation of n normal values has a relative error of 1 / sqrt(2n); allow five of them.
            assert param.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * param.numel())), name
    assert not values["blocks.0.mlp.up.weight"].equal(values["blocks.1.mlp.up.weight"])


def test_initialization_leaves_the_global_random_state_alone():
    model = small_gpt(small_config())
    before = torch.get_rng_state()
    initialize(model, seed=3)
    assert torch.get_rng_state().equal(before)


def test_padding_is_never_predicted_and_never_changes():
    config = small_config()
    model, (tokens, targets) = small_gpt(config), batch(config)
    assert model.token_embedding.weight.shape == (128, 24)
    assert model(tokens).shape == (2, 16, 61)
    model(tokens, targets).backward()
    assert model.token_embedding.weight[61:].eq(0).all()
    assert model.token_embedding.weight.grad[61:].eq(0).all()
    with torch.no_grad():
        loss = model(tokens, targets)
        model.token_embedding.weight[61:] = 100.0
        assert model(tokens, targets).equal(loss)


def test_a_sequence_without_positions_is_refused():
    config = small_config()
    with pytest.raises(ValueError, match=r"17 tokens exceeds model.seq_length=16"):
        small_gpt(config)(torch.zeros(1, config.seq_length + 1, dtype=torch.int64))


APEX_SOURCES = {  # the content of the package's `normalization.py`, if it has one
    "absent": None,
    "unrelated": "",
    "without its CUDA extension": "class FusedLayerNorm:\n    def __init__(self, n): import no_such_extension",
    "working": "class FusedLayerNorm:\n    def __init__(self, n): pass",
}


@pytest.mark.parametrize("apex", APEX_SOURCES)
def test_apex_is_used_where_it_works_on_a_cuda_device(apex, tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    if APEX_SOURCES[apex] is not None:
        (tmp_path / "apex" / "normalization.py").write_text(APEX_SOURCES[apex])
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("apex", "apex.normalization"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    expected = "apex.normalization.FusedLayerNorm" if apex == "working" else "torch.nn.LayerNorm"
    assert choose_norm("layer", torch.device("cuda"))[1] == expected
    assert choose_norm("layer", torch.device("cpu")) == (nn.LayerNorm, "torch.nn.LayerNorm")
    for module in ("apex", "apex.normalization"):
        sys.modules.pop(module, None)
