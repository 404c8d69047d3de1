"""Configurations of transformers in this project, and the reverse.

transformers takes most of a second to import, so it is imported where it is used; a rank that trains does not need it.
"""

from collections.abc import Mapping
from typing import Any

from gpt.families import FAMILIES
from gpt.families.family import RESOLVED, VALUES, Family, refuse_unless
from gpt.shape.config import ModelConfig
from parallel.validation.errors import ConfigError

# By default a configuration of transformers has ids of its own, which may lie outside of the vocabulary.
NO_SPECIAL_IDS = {"bos_token_id": None, "eos_token_id": None}


def family_of(config: ModelConfig) -> Family:
    """Return the family in which a model is written. Raises ConfigError if transformers has no such model."""
    nearest, misfits = min(((each, list(each.misfits(config))) for each in FAMILIES.values()), key=_num_misfits)
    if not misfits:
        return nearest
    options = [f"model.{name}={getattr(config, VALUES.get(name, name))}".lower() for name in misfits]
    raise ConfigError(
        f"no family of transformers that is supported has {', '.join(options)} beside the rest of this model: its "
        "weights cannot be written in that format; choose the options of one of configs/models, or write no weights"
    )


def _num_misfits(one: tuple[Family, list[str]]) -> int:
    return len(one[1])


def config_from_transformers(config: Any) -> ModelConfig:
    """Return a configuration of transformers in this project.

    Raises ConfigError, with the name of the field, if the model has a feature that is not supported here.
    """
    family = FAMILIES[config.model_type]
    for name, supported in family.fixed.items():
        refuse_unless(name, getattr(config, name, supported), supported)
    named = {ours: getattr(config, theirs, None) for ours, theirs in family.fields.items()}  # Qwen 2 has no head_dim
    return ModelConfig(vocab_size=config.vocab_size, **{**named, **family.to_ours(config), **family.options})


def config_to_transformers(config: ModelConfig, special_ids: Mapping[str, int | None] = NO_SPECIAL_IDS) -> Any:
    """Return the configuration in transformers; `special_ids` are those of the tokens that begin and end a text."""
    import transformers

    family = family_of(config)
    named = {theirs: getattr(config, RESOLVED.get(ours, ours)) for ours, theirs in family.fields.items()}
    return getattr(transformers, family.configuration)(
        vocab_size=config.vocab_size,
        architectures=[family.architecture],
        **{**family.fixed, **named, **family.to_theirs(config)},
        **special_ids,
    )
