"""GPT-2."""

from collections.abc import Iterator
from typing import Any

from gpt.families.family import SIZE, Family, Packed, refuse_unless
from gpt.shape.config import ModelConfig

OPTIONS = {
    "positions": "learned",
    "norm": "layer",
    "mlp": "gelu",
    "qk_norm": False,
    "biases": True,
    "qkv_bias": False,
}


def _to_ours(config: Any) -> dict[str, Any]:
    for name in ("attn_pdrop", "embd_pdrop"):
        refuse_unless(name, getattr(config, name), config.resid_pdrop)
    return {}


def _to_theirs(config: ModelConfig) -> dict[str, Any]:
    return {"n_inner": config.mlp_width, **dict.fromkeys(("embd_pdrop", "attn_pdrop"), config.dropout)}


def _unfit_sizes(config: ModelConfig) -> Iterator[str]:
    if config.hidden_size != config.num_heads * config.head_size:
        yield "head_dim"
    if config.kv_heads != config.num_heads:
        yield "num_kv_heads"


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    configuration="GPT2Config",
    options={**OPTIONS, "tied_head": True},
    fields={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_heads": "n_head",
        "seq_length": "n_positions",
        "dropout": "resid_pdrop",
        "norm_eps": "layer_norm_epsilon",
        "mlp_width": "n_inner",
    },
    derived=frozenset({"num_kv_heads", "head_dim"}),
    to_ours=_to_ours,
    to_theirs=_to_theirs,
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
    unfit_sizes=_unfit_sizes,
)
