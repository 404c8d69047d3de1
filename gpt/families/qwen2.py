"""Qwen 2 and 2.5: a Llama with biases of queries, keys and values."""

from dataclasses import replace

from gpt.families import llama

FAMILY = replace(
    llama.FAMILY,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    configuration="Qwen2Config",
    options={**llama.OPTIONS, "qkv_bias": True},
    fixed=llama.FIXED,
    unfit_sizes=lambda _config: [],
)
