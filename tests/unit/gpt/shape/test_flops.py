"""The formulas of FLOPs against torch's counter of executed operations, and against Megatron-LM's formula."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpt.builder.train_state import build_model
from gpt.model.transformer import initialize
from gpt.shape.config import ModelConfig
from gpt.shape.flops import hardware_flops, model_flops, peak_flops_per_second
from tests.unit.gpt.model.models import ONE_DEVICE, VARIANTS, batch, small_config
from zero.activations.checkpointed_blocks import ActivationsConfig


def counted_flops(config: ModelConfig, activations: ActivationsConfig) -> int:
    model = build_model(config, activations, ONE_DEVICE, torch.device("cpu"), torch.float64)
    initialize(model, seed=1)
    with FlopCounterMode(display=False) as counter:
        model(*batch(config, num_sequences=3)).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", VARIANTS)
def test_hardware_flops_of_every_option_and_preset_are_those_that_torch_counts(name):
    # With dropout, backward needs the output of every product; without it, torch omits the last one of a group.
    config = replace(VARIANTS[name], attention="math", dropout=0.1)
    for store, recomputes in (("none", "nothing"), ("selective", "attention"), ("keep", "blocks")):
        activations = ActivationsConfig(store, layers_per_checkpoint=2)
        assert counted_flops(config, activations) == hardware_flops(config, 3, recomputes)


def test_model_flops_are_hardware_flops_less_the_masked_half_of_attention():
    config = small_config(attention="math", vocab_multiple=61)  # without padding, which counts as hardware FLOPs only
    attention = 3 * 4 * config.num_layers * config.seq_length**2 * config.hidden_size * 3
    assert hardware_flops(config, 3, "nothing") - model_flops(config, 3) == attention // 2
    flash = small_config(attention="flash", vocab_multiple=61)
    assert hardware_flops(flash, 3, "nothing") == model_flops(flash, 3) == model_flops(config, 3)


def test_model_flops_are_megatrons_formula():
    config = ModelConfig(num_layers=48, hidden_size=1600, num_heads=25, seq_length=1024, vocab_size=50304)
    layers, h, s, vocab = 48, 1600, 1024, 50304
    expected = 72 * 512 * s * layers * h**2 * (1 + s / (12 * h) + vocab / (12 * layers * h))
    assert model_flops(config, 512) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("device_name", "fp16", "bf16"),
    [
        ("Tesla V100-SXM3-32GB", 125e12, None),
        ("NVIDIA H100 80GB HBM3", 989e12, 989e12),
        ("NVIDIA H100 PCIe", 756e12, 756e12),
        ("cpu", None, None),
    ],
)
def test_peaks_are_those_of_the_device_and_of_its_kind(device_name, fp16, bf16):
    found = [peak_flops_per_second(device_name, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    assert found == [fp16, bf16, None]
