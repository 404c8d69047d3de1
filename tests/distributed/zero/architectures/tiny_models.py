"""Tiny models of transformers, made by rules on the names of their settings, and inputs that they accept."""

import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch import Generator, Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.distributed.zero.architectures.precision import computing_in_float64

VOCAB, WIDTH, BATCH, LENGTH = 99, 32, 2, 8
# The first pattern that the name of a setting matches gives its largest value.
RULES: list[tuple[str, int]] = [
    (r"^(max_|n_)?(position|source_position|target_position|2d_position).*|position_embeddings$|n_positions", 64),
    (r"(num|n)_(key_value|kv)_(attention_)?heads$", 2),
    (r"head_dim$|^d_kv$|^attention_head_size$|^mamba_d_head$|^rotary_dim$|patch_size$", 8),
    (r"heads?$|experts$", 4),
    (r"image_size$", 32),
    (r"experts?_per_tok(en)?$|top_?k$|^moe_k$|topk_group$|^n_group$|num_expert_group|layers?$|depth$|num_blocks$", 2),
    (r"vocab_size", VOCAB),
    (r"(intermediate|ffn|inner).*(size|dim|hidden)$|^d_ff$|ffn_dim$|^ffw?_?dim|mlp_dim$|dim_feedforward|^n_inner$", 64),
    (r"lora_rank$|state_size$|d_state$|num_pos_feats$|mel_bins$", 16),
    (r"(size|dims?|channels?|d_model|width|n_embd|features|filters)$|^(embed|hidden|dim|d_embed|classifier)", WIDTH),
]
# Names that match a rule, and are no sizes of weights.
KEPT = re.compile(
    r"kernel|stride|merge_size|group_size|groups_|grouped|_ratio|spatial|temporal_patch|tubelet|pool|type_vocab|hop"
    r"|chunk_size|n_fft|sampling|first_k|block_size|conv_dim_|scale|token_(id|index)$|num_channels"
)
# Values for settings whose default is None, from which a model class cannot be built.
MISSING = {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": VOCAB, "num_experts_per_tok": 2}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8}
CONVOLUTIONS = {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]}
WINDOWS = {"image_size": 64, "window_size": 2, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 2]}
# Settings that the rules do not find, by model type.
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": MAMBA_2 | {"attn_layer_indices": [1]},
    "big_bird": {"block_size": 1, "num_random_blocks": 1},
    "bigbird_pegasus": {"block_size": 1, "num_random_blocks": 1},
    "bit": CONVOLUTIONS | {"embedding_size": 8, "num_groups": 4},
    "convnext": CONVOLUTIONS,
    "convnextv2": CONVOLUTIONS,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MAMBA_2 | {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longformer": {"attention_window": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8},
    "poolformer": CONVOLUTIONS,
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    # It draws seeds of its own from the clock, for dropout and for hashes.
    "reformer": {"is_decoder": True, "axial_pos_shape": [2, 4], "axial_pos_embds_dim": [8, 24], "num_buckets": 2}
    | {"hash_seed": 0, "hidden_dropout_prob": 0.0}
    | {"lsh_attention_probs_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0},
    "regnet": CONVOLUTIONS | {"embedding_size": 8, "groups_width": 8},
    "resnet": CONVOLUTIONS | {"embedding_size": 8},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
}
INHERITED = {field.name for field in dataclasses.fields(PreTrainedConfig)}


def tiny(config_class: type[PreTrainedConfig], **given: Any) -> PreTrainedConfig:
    """Return a small configuration: the defaults of a class, shrunk by RULES, but for what is given."""
    values: dict[str, Any] = {
        name: tiny(inner)
        for name, inner in config_class.sub_configs.items()
        if inner.__name__ != "AutoConfig" and name not in given
    }
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    for number, (name, default) in enumerate(defaults.items()):
        if default is None and name in MISSING:
            values[name] = MISSING[name]
        elif name == "num_key_value_heads" and default == defaults.get("num_attention_heads"):
            values[name] = limit_of("num_attention_heads")
        elif type(default) is int and re.search(r"token_(id|index)$", name) and default >= VOCAB:
            values[name] = VOCAB - 1 - number % 30
        elif type(default) is int and name not in INHERITED:
            values[name] = min(default, limit_of(name) or default)
        elif "layerdrop" in name:
            values[name] = 0.0  # each rank would skip other layers
    return config_class(**values | given)


def limit_of(name: str) -> int | None:
    return None if KEPT.search(name) else next((limit for rule, limit in RULES if re.search(rule, name)), None)


def tokens(_config: PreTrainedConfig, generator: Generator) -> Tensor:
    """Return ids of usual tokens: special ones are below 5 and above 60."""
    return torch.randint(5, 60, (BATCH, LENGTH), generator=generator)


def images(config: PreTrainedConfig, generator: Generator) -> Tensor:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(BATCH, getattr(config, "num_channels", 3), height, width, generator=generator).double()


def waves(_config: PreTrainedConfig, generator: Generator) -> Tensor:
    return torch.randn(BATCH, 6000, generator=generator).double()


def spectrogram(config: PreTrainedConfig, generator: Generator) -> Tensor:
    return torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions, generator=generator).double()


Maker = Callable[[PreTrainedConfig, Generator], Tensor]
TEXT: dict[str, Maker] = {"input_ids": tokens}
# The table of classes that has a model type, and the inputs of these classes.
KINDS: dict[str, tuple[str, dict[str, Maker]]] = {
    "speech to text": ("SPEECH_SEQ_2_SEQ", {"input_features": spectrogram, "decoder_input_ids": tokens}),
    "text to text": ("SEQ_TO_SEQ_CAUSAL_LM", {"input_ids": tokens, "decoder_input_ids": tokens}),
    "next token": ("CAUSAL_LM", TEXT),
    "masked token": ("MASKED_LM", TEXT),
    "speech": ("CTC", {"input_values": waves}),
    "image": ("IMAGE_CLASSIFICATION", {"pixel_values": images}),
    "image and text": ("ZERO_SHOT_IMAGE_CLASSIFICATION", {"input_ids": tokens, "pixel_values": images}),
}


def classes_of(kind: str) -> dict[str, str]:
    """Return {model type: the name of its class}."""
    found = getattr(modeling_auto, f"MODEL_FOR_{KINDS[kind][0]}_MAPPING_NAMES")
    return {model_type: name if isinstance(name, str) else name[0] for model_type, name in found.items()}


def build(kind: str, model_type: str) -> PreTrainedModel:
    """Return a model in float64, with noise on the initial values: zeros and ones would leave gradients at zero."""
    config = tiny(CONFIG_MAPPING[model_type], **SETTINGS.get(model_type, {}))
    model_class = getattr(transformers, classes_of(kind)[model_type])
    with torch.device("meta"):
        assert sum(param.numel() for param in model_class(config).parameters()) < 8e6, "it is not tiny"
    model = model_class._from_config(config, experts_implementation="eager").to(torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.nan_to_num(0, 0, 0).clamp(-5, 5) + 0.05 * torch.randn_like(param))
    return model.train()


def loss_of(model: nn.Module, config: PreTrainedConfig, kind: str, seed: int) -> Tensor:
    """Return a fixed function of everything differentiable that the model returns for inputs that `seed` determines."""
    generator = Generator().manual_seed(seed)
    inputs = {name: make(config, generator) for name, make in KINDS[kind][1].items()}
    for set_seed in (torch.manual_seed, np.random.seed, random.seed):  # dropout, and random patterns of attention
        set_seed(1000 + seed)
    with computing_in_float64():
        return sum(scalar(tensor) for tensor in tensors_in(model(**inputs)) if tensor.grad_fn is not None)


def scalar(tensor: Tensor) -> Tensor:
    """Return a projection on fixed weights; tanh bounds masked values such as the lowest of a dtype."""
    weights = torch.arange(tensor.numel(), dtype=torch.float64).cos().view(tensor.shape)
    return (tensor.tanh() * weights).sum() / tensor.numel() ** 0.5


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested dictionaries, tuples, lists and outputs."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, tuple, list)):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(branch)
