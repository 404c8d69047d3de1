"""muP: what is scaled, what is not, and that changes of activations do not grow with the width."""

import math

import pytest
import torch
from torch import Tensor

from gpt.builder.train_state import build, parameter_groups
from gpt.kernels.documents import Documents
from gpt.model.transformer import GPT
from gpt.pretrained.weights import load_pretrained, write_weights
from gpt.settings.optimizer import OptimizerSettings
from gpt.settings.parser import parse_settings
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from tests.unit.gpt.model.models import batch, small_config, small_gpt

BASE = "{data: {path: nowhere}, model: {num_layers: 1, hidden_size: 32, num_heads: 2, seq_length: 4, vocab_size: 64}}"
LR, DECAY = 0.01, 0.1


def trained(model: GPT, num_steps: int = 3, lr: float = LR) -> list[Tensor]:
    """Return the losses of some steps, the gradients of the last one and the parameters after it."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(parameter_groups(model, OptimizerSettings(lr, DECAY)), lr=lr)
    tokens, targets = batch(model.config, 4)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        losses.append(model(tokens, targets))
        losses[-1].backward()
        optimizer.step()
    params = list(model.parameters())
    return [*losses, *(param.grad for param in params), *params]


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_the_base_model_is_that_without_mup_to_the_bit(attention):
    plain = small_config(attention=attention, tied_head=False)
    base = small_config(attention=attention, tied_head=False, mup_base_width=24, mup_base_head_dim=8)
    for one, other in zip(trained(small_gpt(plain)), trained(small_gpt(base)), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_the_learning_rate_of_hidden_matrices_is_divided_by_the_width(name):
    options = ["--model.mup_base_width=8", "--model.tied_head=false", f"--optimizer.name={name}"]
    options.append("--optimizer.embedding_lr_factor=8")
    state = build(parse_settings([f"--config={BASE}", *options]), Mesh.create(1), torch.device("cpu"))
    module, settings = state.model.module, OptimizerSettings(LR, DECAY, embedding_lr_factor=8)
    names = {param: name for name, param in module.named_parameters()}
    groups = parameter_groups(module, settings)
    assert sorted(names[param] for group in groups for param in group["params"]) == sorted(names.values())
    for group in groups:
        for param in group["params"]:
            is_hidden = names[param].startswith("blocks.") and param.dim() == 2
            is_embedding = names[param] == "token_embedding.weight"
            assert group.get("lr", LR) == LR * (1 / 4 if is_hidden else 8 if is_embedding else 1)
            assert group["weight_decay"] == (0.0 if param.dim() == 1 else 4 * DECAY if is_hidden else DECAY)
    state.set_learning_rate(0.5)
    inner = state.optimizer.param_groups
    assert sorted(group["lr"] for group in inner) == [0.125, 0.5, 0.5, 4.0]


def test_an_optimizer_for_which_learning_rates_have_other_rules_is_refused():
    for name in ("muon", "soap", "sgd"):
        with pytest.raises(ConfigError, match=rf"model\.mup_base_width=8 .*optimizer\.name={name}; choose"):
            parse_settings([f"--config={BASE}", "--model.mup_base_width=8", f"--optimizer.name={name}"])
    with pytest.raises(ConfigError, match=r"model\.mup_base_head_dim=8 needs model\.mup_base_width"):
        small_config(mup_base_head_dim=8)


def test_initial_values_of_hidden_matrices_and_logits_fall_with_the_width():
    plain, wide = small_gpt(small_config()), small_gpt(small_config(mup_base_width=6))
    for (name, one), other in zip(plain.named_parameters(), wide.parameters(), strict=True):
        factor = 0.5 if name.startswith("blocks.") and one.dim() == 2 else 1.0
        torch.testing.assert_close(one * factor, other, rtol=1e-15, atol=0)
    tokens, _ = batch(plain.config)
    wide.load_state_dict(plain.state_dict())
    torch.testing.assert_close(wide(tokens), plain(tokens) / 4, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_is_scaled_as_at_the_base_size_of_heads(attention, is_masked):
    plain = small_gpt(small_config(attention=attention))
    scaled = small_gpt(small_config(attention=attention, mup_base_width=24, mup_base_head_dim=2))
    scaled.load_state_dict(plain.state_dict())
    for block in plain.blocks:  # heads of 8: sqrt(2) / 8 is half of 1 / sqrt(8)
        for part in (block.attention.qkv.weight, block.attention.qkv.bias):
            part.data.unflatten(0, (3, 3, 8))[:, 0] *= math.sqrt(2) / 8 * math.sqrt(8)
    tokens, targets = batch(plain.config)
    documents = (
        Documents(torch.arange(8).repeat(2, 2), torch.arange(0, 33, 8, dtype=torch.int32)) if is_masked else None
    )
    expected = plain(tokens, targets, documents=documents)
    torch.testing.assert_close(scaled(tokens, targets, documents=documents), expected, rtol=1e-12, atol=0)


def changes(width: int, options: dict[str, int]) -> dict[str, float]:
    """Return the root mean square of the change that a few steps make to the logits and to the output of each layer."""
    model = small_gpt(small_config(hidden_size=width, num_heads=4, num_layers=2, **options)).float()
    torch.manual_seed(1)
    tokens, _ = batch(model.config, 4)
    layers = {name: layer for name, layer in model.named_modules() if name.endswith((".attention", "mlp.down"))}
    seen: dict[str, list[Tensor]] = {name: [] for name in [*layers, "logits"]}
    for is_last in (False, True):
        hooks = [
            layer.register_forward_hook(lambda _layer, _args, output, name=name: seen[name].append(output.detach()))
            for name, layer in layers.items()
        ]
        seen["logits"].append(model(tokens).detach())
        for hook in hooks:
            hook.remove()
        if not is_last:
            trained(model, lr=1e-3)
    return {name: (after - before).square().mean().sqrt().item() for name, (before, after) in seen.items()}


def test_changes_of_activations_do_not_grow_with_the_width():
    for options, low, high in (({}, 3, 100), ({"mup_base_width": 32, "mup_base_head_dim": 8}, 0.5, 1.5)):
        narrow, wide = changes(32, options), changes(256, options)
        assert len(narrow) == 5
        for name, change in wide.items():
            assert low < change / narrow[name] < high, (name, options)


def test_exported_weights_are_those_of_the_same_function(tmp_path):
    model = small_gpt(small_config(num_layers=2, mup_base_width=6))
    for param in model.parameters():
        param.data += torch.linspace(-0.1, 0.1, param.numel()).view_as(param)
    model.token_embedding.weight.data[61:] = 0
    write_weights(tmp_path, model.config, model.named_parameters())
    tokens, _ = batch(model.config)
    for options in ({}, {"mup_base_width": 6}, {"mup_base_width": 8}):
        other = small_gpt(small_config(num_layers=2, **options), seed=2)
        load_pretrained(other, tmp_path)
        torch.testing.assert_close(other(tokens), model(tokens), rtol=1e-12, atol=1e-13)
    other = small_gpt(small_config(num_layers=2, mup_base_width=6, mup_base_head_dim=2))
    with pytest.raises(ConfigError, match=r"choose model\.mup_base_head_dim=null"):
        load_pretrained(other, tmp_path)
    with pytest.raises(ConfigError, match=r"has model\.mup_base_head_dim=2 beside"):
        write_weights(tmp_path, small_config(mup_base_width=6, mup_base_head_dim=2), [])
