"""The description of a family of models: its configuration and its tensors in transformers, and here."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpt.shape.config import ModelConfig
from parallel.validation.errors import ConfigError
from zero.checkpoint.schema import shown

SIZE = range(1, 2**31)
RESOLVED = {"num_kv_heads": "kv_heads", "head_dim": "head_size", "mlp_width": "mlp_size"}  # values of options with None
VALUES = {**RESOLVED, "mup_base_head_dim": "scaled_head_dim"}  # the property that has the value of an option
# Options that change no logit, or the number of rows of words only.
FREE = {"vocab_size", "vocab_multiple", "attention", "dropout", "mup_base_width"}
UNUSED = {"rope": {"seq_length"}, "learned": {"rope_theta", "rope_scaling"}}  # of one kind of positions


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

    `options` are those of `model` that all of them have, and `fields` the keys of their configuration by the options of
    `model`; `to_ours` and `to_theirs` return what else a configuration determines here (the options `derived`) and
    there, after checks, and `unfit_sizes` the options whose sizes are not possible there. `fixed` are keys that may
    have one value only. `modules` are the names of modules here and there; a block's are relative to the block.
    `packed` are those of modules whose parameters are packed.
    """

    model_type: str
    architecture: str
    configuration: str
    options: Mapping[str, Any]
    fields: Mapping[str, str]
    derived: frozenset[str]
    to_ours: Callable[[Any], dict[str, Any]]
    to_theirs: Callable[[ModelConfig], dict[str, Any]]
    required: tuple[str, ...]  # keys of config.json that are sizes
    optional: Mapping[str, Any]  # schemas of the other keys that are read
    fixed: Mapping[str, Any]
    prefix: str
    modules: Mapping[str, str]
    packed: Mapping[str, Packed]
    is_transposed: bool = False  # weights are (in, out)
    ignored: tuple[str, ...] = ()  # ends of the names of tensors that are no parameters
    unfit_sizes: Callable[[ModelConfig], Iterable[str]] = lambda _config: ()

    @property
    def keys(self) -> set[str]:
        """The keys of config.json that are read, or may have one value only."""
        return {*self.required, *self.optional, *self.fixed}

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        """Iterate over the options that change logits or sizes, with a value that no model of this family has."""
        free = FREE | UNUSED[config.positions] | self.fields.keys() | self.derived
        for field in fields(config):
            name, value = field.name, getattr(config, VALUES.get(field.name, field.name))
            if name not in free - self.options.keys() and value != self.options.get(name, field.default):
                yield name
        yield from self.unfit_sizes(config)


def refuse_unless(name: str, found: Any, supported: Any) -> None:
    """Raise ConfigError unless a key of a configuration has the value that is supported."""
    if found != supported:
        raise ConfigError(
            f"the model has {name}={shown(found)}, only {shown(supported)} is supported; choose another model"
        )
