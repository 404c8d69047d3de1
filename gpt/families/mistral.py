"""Mistral: without a sliding window it is a Llama, and is written as one if its heads divide its width."""

from dataclasses import replace

from gpt.families import llama

FAMILY = replace(
    llama.FAMILY,
    model_type="mistral",
    architecture="MistralForCausalLM",
    configuration="MistralConfig",
    fixed=llama.FIXED,
    unfit_sizes=lambda config: [] if config.hidden_size % config.num_heads else ["num_heads"],
)
