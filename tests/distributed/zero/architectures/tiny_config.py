"""Tiny configurations of any model type of transformers, made by rules on the names of their fields."""

import dataclasses
import re
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.distributed.zero.architectures.overrides import CONFIGS

VOCAB, WIDTH, HEADS, HEAD_DIM = 99, 32, 4, 8

# The first pattern that a field's name matches gives the largest value of its integers.
RULES: list[tuple[str, int]] = [
    (r"^(max_|n_)?(position|source_position|target_position|2d_position).*|position_embeddings$|n_positions", 64),
    (r"(num|n)_(key_value|kv)_(attention_)?heads$", 2),
    (r"head_dim$|^d_kv$|^attention_head_size$|^mamba_d_head$|^rotary_dim$", HEAD_DIM),
    (r"heads?$", HEADS),
    (r"^(num_)?(image|img|input_image|pretrain_image|crop)_size$", 32),
    (r"patch_size$", 8),
    (r"experts?_per_tok(en)?$|top_?k$|^moe_k$|topk_group$|^n_group$|num_expert_group|^mask_(time|feature)_length$", 2),
    (r"experts$", 4),
    (r"layers?$|^depths?$|num_blocks$|_depth$|^stage_numb_of_layers$", 2),
    (r"vocab_size", VOCAB),
    (r"(intermediate|ffn|inner).*(size|dim|hidden)$|^d_ff$|ffn_dim$|^ffw?_?dim|mlp_dim$|dim_feedforward|^n_inner$", 64),
    (r"lora_rank$|state_size$|d_state$|num_pos_feats$", 16),
    (r"mel_bins$|^feature_size$|^num_features$", 16),
    (r"^window_size$|^num_queries$|num_query_tokens|num_latents|^d_latents$", 8),
    (
        r"(size|dims?|channels?|d_model|width|n_embd|features|filters|sizes|dims|upsample_groups)$"
        r"|^(embed|hidden|dim|d_embed|classifier|cross)|_(hidden|embed|dim)_",
        WIDTH,
    ),
]
# Names that match a rule, and are no sizes of weights.
KEPT = re.compile(
    r"kernel|stride|merge_size|group_size|groups_|grouped|_ratio"
    r"|spatial|temporal_patch|tubelet|pool|type_vocab|chunk_size|hop|n_fft|sampling|first_k|block_size|conv_dim_|scale"
    r"|token_(id|index)$"
)
DEPTHS = re.compile(r"depths?$|^layers$|^num_layers$|num_blocks$|numb_of_layers$")
# Values for fields whose default is None, from which a model class cannot be built.
MISSING = {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": VOCAB, "num_experts_per_tok": 2}
COMMON_FIELDS = {field.name for field in dataclasses.fields(PreTrainedConfig)}


def tiny_config(model_type: str, shrinks: bool = True) -> PreTrainedConfig:
    """Return a configuration of `model_type` with small sizes, or its defaults."""
    return tiny(CONFIG_MAPPING[model_type]) if shrinks else CONFIG_MAPPING[model_type]()


def tiny(config_class: type[PreTrainedConfig], **given: Any) -> PreTrainedConfig:
    """Return a small configuration of a class: its defaults, shrunk by RULES, and the overrides of its model type."""
    overrides = CONFIGS.get(config_class.model_type, {}) | given
    arguments = _shrunk_fields(config_class) | overrides
    default = _default_config(config_class) if config_class.sub_configs else None
    for name, sub_class in _sub_config_classes(config_class, default).items():
        value = overrides.get(name, {})
        if isinstance(value, dict):
            arguments[name] = tiny(sub_class, **_backbone_outputs(getattr(default, name, None), sub_class) | value)
    config = _with_all_layer_types(config_class, arguments)
    _shrink_rope_sections(config)
    return config


def _shrunk_fields(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    defaults = {field.name: _default(field) for field in dataclasses.fields(config_class)}
    values: dict[str, Any] = {
        name: MISSING[name] for name, value in defaults.items() if value is None and name in MISSING
    }
    widest = max((max(v) for n, v in defaults.items() if _is_integers(v) and _limit(n) == WIDTH), default=0)
    for name, default in defaults.items():
        if default is dataclasses.MISSING or default is None or name in COMMON_FIELDS:
            continue
        if "layerdrop" in name:
            values[name] = 0.0  # each rank would skip other layers
        elif (value := shrink(name, default, widest)) != default:
            values[name] = value
    if defaults.get("num_key_value_heads") == defaults.get("num_attention_heads") and "num_key_value_heads" in values:
        values["num_key_value_heads"] = HEADS
    return values | _token_ids(defaults)


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_integers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(v) is int for v in value)


def shrink(name: str, value: Any, widest: int = 0) -> Any:
    """Return a smaller value for the field `name`: an integer, or a list of them, which keeps its length.

    Widths in lists keep their proportions to `widest`, and are divisible by the number of heads.
    """
    limit = _limit(name)
    if limit is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return min(value, limit)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, (list, tuple)) for v in value):
        return type(value)(shrink(name, v, widest) for v in value)
    if not _is_integers(value):
        return value
    if DEPTHS.search(name):
        return type(value)(min(v, 1) for v in value)
    if limit < WIDTH or widest <= limit:
        return type(value)(min(v, limit, 2) if name.endswith(("heads", "head")) else min(v, limit) for v in value)
    return type(value)(v if v <= 8 else max(8, v * 2 * limit // widest // 8 * 8) for v in value)


def _limit(name: str) -> int | None:
    if KEPT.search(name):
        return None
    return next((limit for pattern, limit in RULES if re.search(pattern, name)), None)


def _token_ids(defaults: dict[str, Any]) -> dict[str, int]:
    """Return ids below VOCAB for the special tokens, all different and none of them a usual token."""
    names = [n for n, value in defaults.items() if re.search(r"token_(id|index)$", n) and type(value) is int]
    return {name: defaults[name] if 0 <= defaults[name] < 4 else VOCAB - 1 - i for i, name in enumerate(names)}


def _sub_config_classes(
    config_class: type[PreTrainedConfig], default: PreTrainedConfig | None
) -> dict[str, type[PreTrainedConfig]]:
    classes = {}
    for name, sub_class in config_class.sub_configs.items():
        value = getattr(default, name, None)
        if isinstance(value, PreTrainedConfig):
            classes[name] = type(value)
        elif value is None and sub_class.__name__ != "AutoConfig":
            classes[name] = sub_class
    return classes


def _backbone_outputs(default: PreTrainedConfig | None, sub_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the settings that make a backbone return as many feature maps, in the same form, as by default."""
    indices = getattr(default, "out_indices", None)
    if not indices:
        return {}
    names = {field.name for field in dataclasses.fields(sub_class)}
    form = {name: getattr(default, name) for name in ("reshape_hidden_states", "apply_layernorm") if name in names}
    if "num_hidden_layers" in names:
        return form | {"num_hidden_layers": len(indices), "out_indices": list(range(1, len(indices) + 1))}
    return form | {"out_indices": list(indices)}


def _default_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return config_class()
    except Exception:  # a few defaults contradict each other
        return None


def _with_all_layer_types(config_class: type[PreTrainedConfig], arguments: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration, with a layer of each type that the default has if layers are of several types."""
    kinds = list(dict.fromkeys(getattr(_default_config(config_class), "layer_types", None) or ()))
    if len(kinds) > 1 and "layer_types" not in arguments and "num_hidden_layers" in arguments:
        try:
            return config_class(**arguments | {"layer_types": kinds, "num_hidden_layers": len(kinds)})
        except Exception:  # the types follow from other fields, or are not a field
            pass
    return config_class(**arguments)


def _shrink_rope_sections(config: PreTrainedConfig) -> None:
    """Make the parts of a head that rotate by time, height and width as wide as the head together."""
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [rotated // 3, rotated // 3, rotated - 2 * (rotated // 3)]
