"""The models of transformers whose weights are read and written, and their configurations in this project.

A Mistral without a sliding window is a Llama, and is written as one, unless its heads do not divide its width: there
transformers refuses a Llama. transformers takes most of a second to import, so it is imported where it is used; a rank
that trains does not need it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpt.shape.config import ModelConfig, RopeScaling
from parallel.validation.errors import ConfigError
from zero.checkpoint.schema import shown

SIZE = range(1, 2**31)
# By default a configuration of transformers has ids of its own, which may lie outside of the vocabulary.
NO_SPECIAL_IDS = {"bos_token_id": None, "eos_token_id": None}
GPT2_PARTS = {
    "positions": "learned",
    "norm": "layer",
    "mlp": "gelu",
    "qk_norm": False,
    "biases": True,
    "qkv_bias": False,
}
LLAMA_PARTS = {**GPT2_PARTS, "positions": "rope", "norm": "rms", "mlp": "swiglu", "biases": False}
GPT2_FIELDS = {  # options of `model`: fields of the configuration of transformers
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "seq_length": "n_positions",
    "dropout": "resid_pdrop",
    "norm_eps": "layer_norm_epsilon",
    "mlp_width": "n_inner",
}
LLAMA_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "seq_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}
RESOLVED = {"num_kv_heads": "kv_heads", "head_dim": "head_size", "mlp_width": "mlp_size"}  # values of options with None
ROPE_SCALING = {  # fields of RopeScaling by the names of transformers
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_length",
}


@dataclass(frozen=True)
class Packed:
    """Tensors of transformers that are one parameter here: its rows are ordered (group, tensor, row).

    `groups` is the name of their number, in a ModelConfig. With `pieces`, each tensor is so many of them, one after the
    other.
    """

    names: tuple[str, ...]
    groups: str
    pieces: int = 1


@dataclass(frozen=True)
class Family:
    """The models of one class of transformers.

    `names` are the fields of the configuration by the options of `model`; `to_ours` and `to_theirs` return what else a
    configuration determines here and there, after checks. `fixed` are fields that may have one value only. `modules`
    are the names of modules here and there; a block's are relative to the block. `packed` are those of modules whose
    parameters are packed.
    """

    architecture: str
    configuration: str
    parts: Mapping[str, Any]  # the options of `model` by which the family is told from the others
    names: Mapping[str, str]
    to_ours: Callable[[Any], dict[str, Any]]
    to_theirs: Callable[[ModelConfig], dict[str, Any]]
    required: tuple[str, ...]  # fields of config.json that are sizes
    optional: Mapping[str, Any]  # schemas of the other fields that are read
    fixed: Mapping[str, Any]
    prefix: str
    modules: Mapping[str, str]
    packed: Mapping[str, Packed]
    is_transposed: bool = False  # weights are (in, out)
    ignored: tuple[str, ...] = ()  # ends of the names of tensors that are no parameters


def _gpt2_to_ours(config: Any) -> dict[str, Any]:
    for name in ("attn_pdrop", "embd_pdrop"):
        _refuse_unless(name, getattr(config, name), config.resid_pdrop)
    return {}


def _gpt2_to_theirs(config: ModelConfig) -> dict[str, Any]:
    return {"n_inner": config.mlp_width, **dict.fromkeys(("embd_pdrop", "attn_pdrop"), config.dropout)}


def _llama_to_ours(config: Any) -> dict[str, Any]:
    config.standardize_rope_params()  # again, as a model does: another original length may replace theirs
    rope = config.rope_parameters
    kind = rope.get("rope_type")  # None: there are tables for several kinds of layers
    if kind not in ("default", "llama3"):
        raise ConfigError(f"the model has rope_type={kind}, only default and llama3 are supported; choose another one")
    _refuse_unless("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0)
    scaling = {ours: rope.get(theirs) for theirs, ours in ROPE_SCALING.items()}
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    return {
        "seq_length": min(config.max_position_embeddings, window),  # up to here, a sliding window hides no token
        "dropout": 0.0,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": RopeScaling(**scaling) if kind == "llama3" else None,
    }


def _llama_to_theirs(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope["rope_type"] = "llama3"
        rope |= {theirs: getattr(config.rope_scaling, ours) for theirs, ours in ROPE_SCALING.items()}
    return {"rope_parameters": rope, "sliding_window": None}


def _refuse_unless(name: str, found: Any, supported: Any) -> None:
    if found != supported:
        raise ConfigError(
            f"the model has {name}={shown(found)}, only {shown(supported)} is supported; choose another model"
        )


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    configuration="GPT2Config",
    parts=GPT2_PARTS,
    names=GPT2_FIELDS,
    to_ours=_gpt2_to_ours,
    to_theirs=_gpt2_to_theirs,
    required=("n_layer", "n_embd", "n_head", "n_positions", "vocab_size"),
    optional={
        "n_inner": SIZE,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon"), float),
    },
    fixed={
        "is_causal": True,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
    prefix="transformer.",
    modules={
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "blocks": "h",
        "attention_norm": "ln_1",
        "attention.projection": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "final_norm": "ln_f",
    },
    packed={"attention.qkv.": Packed(("attn.c_attn",), "num_heads", pieces=3)},
    is_transposed=True,
    ignored=(".attn.bias", ".attn.masked_bias"),  # the causal masks of older files
)


def _like_llama(name: str, fixed: Mapping[str, Any], parts: Mapping[str, Any] = LLAMA_PARTS) -> Family:
    """Return a family whose configuration and parameters have the names of Llama's."""
    return Family(
        architecture=f"{name}ForCausalLM",
        configuration=f"{name}Config",
        parts=parts,
        names=LLAMA_FIELDS,
        to_ours=_llama_to_ours,
        to_theirs=_llama_to_theirs,
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
        fixed={"is_causal": True, "hidden_act": "silu", "attention_dropout": 0.0, **fixed},
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
    )


FAMILIES = {  # by the model_type of config.json; the first that has a model's parts is the one in which it is written
    "gpt2": GPT2,
    "llama": _like_llama("Llama", {"attention_bias": False, "mlp_bias": False}),
    "qwen2": _like_llama("Qwen2", {}, {**LLAMA_PARTS, "qkv_bias": True}),
    "qwen3": _like_llama("Qwen3", {"attention_bias": False}, {**LLAMA_PARTS, "qk_norm": True}),
    "mistral": _like_llama("Mistral", {}),
}


def family_of(config: ModelConfig) -> Family:
    """Return the family in which a model is written. Raises ConfigError if transformers has no such model."""
    for name, value, effect in (
        ("mup_base_head_dim", config.scaled_head_dim, "scales attention"),
        ("logit_cap", config.logit_cap, "caps logits"),
    ):
        if value is not None:
            raise ConfigError(
                f"model.{name}={value} {effect}, and the models of transformers that are supported do not: its weights "
                "cannot be written in that format; write no weights"
            )
    has_equal_sizes = config.hidden_size == config.num_heads * config.head_size == config.kv_heads * config.head_size
    fits = {"gpt2": config.tied_head and has_equal_sizes, "llama": config.hidden_size % config.num_heads == 0}
    for kind, family in FAMILIES.items():
        has_parts = all(getattr(config, part) == value for part, value in family.parts.items())
        if has_parts and fits.get(kind, True):
            return family
    names = *GPT2_PARTS, "tied_head", "num_kv_heads", "head_dim"
    options = ", ".join(f"model.{name}={getattr(config, name)}".lower() for name in names)
    raise ConfigError(
        f"transformers has no model with {options}: its weights cannot be written in that format; choose the parts of "
        "configs/models/gpt2.yaml, llama.yaml, qwen2.yaml or qwen3.yaml, or write no weights"
    )


def config_from_transformers(config: Any) -> ModelConfig:
    """Return a configuration of transformers in this project.

    Raises ConfigError, with the name of the field, if the model has a feature that is not supported here.
    """
    family = FAMILIES[config.model_type]
    for name, supported in family.fixed.items():
        _refuse_unless(name, getattr(config, name, supported), supported)
    named = {ours: getattr(config, theirs, None) for ours, theirs in family.names.items()}  # Qwen 2 has no head_dim
    return ModelConfig(vocab_size=config.vocab_size, **{**named, **family.to_ours(config)}, **family.parts)


def config_to_transformers(config: ModelConfig, special_ids: Mapping[str, int | None] = NO_SPECIAL_IDS) -> Any:
    """Return the configuration in transformers; `special_ids` are those of the tokens that begin and end a text."""
    import transformers

    family = family_of(config)
    named = {theirs: getattr(config, RESOLVED.get(ours, ours)) for ours, theirs in family.names.items()}
    return getattr(transformers, family.configuration)(
        vocab_size=config.vocab_size,
        architectures=[family.architecture],
        **{**family.fixed, **named, **family.to_theirs(config)},
        **special_ids,
    )
