"""Conversion of GPT-2 weights and configurations between this project and transformers, in both directions.

         transformers                               here
linear   weight (in, out): Conv1D                   weight (out, in)
qkv      columns (q | k | v, head, head_dim)        rows (head, q | k | v, head_dim)
head     lm_head.weight, tied                       no entry: the token embedding

transformers takes most of a second to import, so it is imported where it is used; a rank that trains does not need it.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.model.transformer import GPT, LAYER_NORM_EPS, ModelConfig
from parallel.errors import ConfigError
from parallel.tensor.layers import split_dims

if TYPE_CHECKING:
    from transformers import GPT2Config

MODULE_NAMES = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "blocks": "h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "final_norm": "ln_f",
}
TOKEN_EMBEDDING = "token_embedding.weight"
LINEAR_WEIGHTS = ("qkv.weight", "projection.weight", "up.weight", "down.weight")
# By default GPT2Config has GPT-2's own ids, which may lie outside of the vocabulary.
NO_SPECIAL_IDS = {"bos_token_id": None, "eos_token_id": None}
# Fields of GPT2Config that this project's GPT-2 does not vary.
FIXED_FIELDS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": LAYER_NORM_EPS,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def config_from_huggingface(config: "GPT2Config") -> ModelConfig:
    """Return the configuration in this project. Raises ConfigError if it uses a feature that is not supported here."""
    for name, ours in {**FIXED_FIELDS, "attn_pdrop": config.resid_pdrop, "embd_pdrop": config.resid_pdrop}.items():
        if (theirs := getattr(config, name)) != ours:
            raise ConfigError(f"the model has {name}={theirs}, only {ours} is supported; choose another model")
    if config.n_inner not in (None, 4 * config.n_embd):
        raise ConfigError(
            f"the model has n_inner={config.n_inner}, only {4 * config.n_embd} is supported; choose another model"
        )
    return ModelConfig(
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_heads=config.n_head,
        seq_length=config.n_positions,
        vocab_size=config.vocab_size,
        dropout=config.resid_pdrop,
    )


def config_to_huggingface(config: ModelConfig, special_ids: Mapping[str, int | None] = NO_SPECIAL_IDS) -> "GPT2Config":
    """Return the configuration in transformers; `special_ids` are those of the tokens that begin and end a text."""
    from transformers import GPT2Config

    return GPT2Config(
        n_layer=config.num_layers,
        n_embd=config.hidden_size,
        n_head=config.num_heads,
        n_positions=config.seq_length,
        vocab_size=config.vocab_size,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        architectures=["GPT2LMHeadModel"],
        **FIXED_FIELDS,
        **special_ids,
    )


def name_from_huggingface(name: str) -> str | None:
    """Return this project's name of a parameter of a GPT2LMHeadModel or GPT2Model.

    Return None for an entry that is not a parameter here: the tied head, and the causal masks of older files.
    """
    if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return _rename(name.removeprefix("transformer."), {theirs: ours for ours, theirs in MODULE_NAMES.items()})


def name_to_huggingface(name: str) -> str:
    """Return the name in a GPT2LMHeadModel of this project's parameter `name`."""
    return f"transformer.{_rename(name, MODULE_NAMES)}"


def shape_from_huggingface(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of this project's parameter `name`, of which transformers has a tensor of this shape."""
    return shape[::-1] if name.endswith(LINEAR_WEIGHTS) else shape


def tensor_from_huggingface(name: str, tensor: Tensor, num_heads: int) -> Tensor:
    """Return this project's parameter `name`, contiguous, converted from the tensor of transformers."""
    tensor = tensor.T if name.endswith(LINEAR_WEIGHTS) else tensor
    return (_swap_first_dims(tensor, 3, num_heads) if ".qkv." in name else tensor).contiguous()


def tensor_to_huggingface(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Return the tensor of transformers, contiguous, converted from this project's parameter `name`.

    The rows that pad the vocabulary are left out.
    """
    if name == TOKEN_EMBEDDING:
        return tensor[: config.vocab_size].contiguous()
    tensor = _swap_first_dims(tensor, config.num_heads, 3) if ".qkv." in name else tensor
    return (tensor.T if name.endswith(LINEAR_WEIGHTS) else tensor).contiguous()


def load_weights(model: GPT, weights: Mapping[str, Tensor]) -> None:
    """Copy whole parameters into a model of any tensor size, and set the padding of the vocabulary to zero.

    `weights` holds them by this project's names, and is read one parameter at a time: it may read each from disk.
    Raises ConfigError if a value is not finite in the data type of the model.
    """
    axis, dims = model.tokens.axis, split_dims(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = weights[name].to(param.dtype)
            if not whole.isfinite().all():
                raise ConfigError(
                    f"{name_to_huggingface(name)} has {int((~whole.isfinite()).sum())} values that are not finite in "
                    f"{param.dtype}, 0 are allowed; choose other weights or another precision"
                )
            if name == TOKEN_EMBEDDING:
                whole = F.pad(whole, (0, 0, 0, model.config.padded_vocab_size - whole.shape[0]))
            param.copy_(whole.chunk(axis.size, dims[name])[axis.rank] if name in dims else whole)


def _rename(name: str, modules: Mapping[str, str]) -> str:
    """Return a parameter's name with each module in its path renamed."""
    paths = "|".join(map(re.escape, modules))
    # Only between dots or at the beginning: "up" must not match inside of another module's name.
    return re.sub(rf"(?<![^.])({paths})(?=\.)", lambda match: modules[match[1]], name)


def _swap_first_dims(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder rows from (outer, inner, head_dim) to (inner, outer, head_dim)."""
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)
