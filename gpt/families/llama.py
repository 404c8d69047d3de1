"""Llama 2 and 3; families whose keys and tensors have the same names are made of it by `replace`."""

from typing import Any

from gpt.families.family import SIZE, Family, Packed, refuse_unless
from gpt.families.gpt2 import OPTIONS as GPT2
from gpt.shape.config import ModelConfig, RopeScaling
from parallel.validation.errors import ConfigError

OPTIONS = {**GPT2, "positions": "rope", "norm": "rms", "mlp": "swiglu", "biases": False}
FIXED = {"is_causal": True, "hidden_act": "silu", "attention_dropout": 0.0}
ROPE_SCALING = {  # fields of RopeScaling by the names of transformers
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_length",
}


def _to_ours(config: Any) -> dict[str, Any]:
    config.standardize_rope_params()  # again, as a model does: another original length may replace theirs
    rope = config.rope_parameters
    kind = rope.get("rope_type")  # None: there are tables for several kinds of layers
    if kind not in ("default", "llama3"):
        raise ConfigError(f"the model has rope_type={kind}, only default and llama3 are supported; choose another one")
    refuse_unless("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0)
    scaling = {ours: rope.get(theirs) for theirs, ours in ROPE_SCALING.items()}
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    return {
        "seq_length": min(config.max_position_embeddings, window),  # up to here, a sliding window hides no token
        "dropout": 0.0,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": RopeScaling(**scaling) if kind == "llama3" else None,
    }


def _to_theirs(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope["rope_type"] = "llama3"
        rope |= {theirs: getattr(config.rope_scaling, ours) for theirs, ours in ROPE_SCALING.items()}
    return {"rope_parameters": rope, "sliding_window": None}


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    configuration="LlamaConfig",
    options=OPTIONS,
    fields={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "mlp_width": "intermediate_size",
        "seq_length": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "tied_head": "tie_word_embeddings",
    },
    derived=frozenset({"rope_theta", "rope_scaling"}),
    to_ours=_to_ours,
    to_theirs=_to_theirs,
    required=(
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "vocab_size",
    ),
    optional={
        **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), SIZE),
        "original_max_position_embeddings": SIZE,
        **dict.fromkeys(("rms_norm_eps", "rope_theta", "attention_dropout", "partial_rotary_factor"), float),
        **dict.fromkeys(("tie_word_embeddings", "use_sliding_window"), bool),
        **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
    },
    fixed={**FIXED, "attention_bias": False, "mlp_bias": False},
    prefix="model.",
    modules={
        "token_embedding": "embed_tokens",
        "blocks": "layers",
        "attention_norm": "input_layernorm",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.projection": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.down": "mlp.down_proj",
        "final_norm": "norm",
        "head": "lm_head",
    },
    packed={
        "attention.qkv.": Packed(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "num_heads"),
        "attention.qkv.q_": Packed(("self_attn.q_proj",), "num_heads"),
        "attention.qkv.kv_": Packed(("self_attn.k_proj", "self_attn.v_proj"), "kv_heads"),
        "mlp.up.": Packed(("mlp.gate_proj", "mlp.up_proj"), "mlp_size"),
    },
    ignored=(".rotary_emb.inv_freq",),
    unfit_sizes=lambda config: ["num_heads"] if config.hidden_size % config.num_heads else [],
)
