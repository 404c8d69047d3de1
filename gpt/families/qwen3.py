"""Qwen 3: a Llama with norms of queries and keys."""

from dataclasses import replace

from gpt.families import llama

FAMILY = replace(
    llama.FAMILY,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    configuration="Qwen3Config",
    options={**llama.OPTIONS, "qk_norm": True},
    fixed={**llama.FIXED, "attention_bias": False},
    unfit_sizes=lambda _config: [],
)
