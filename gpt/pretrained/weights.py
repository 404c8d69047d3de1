"""Folders of weights in the format of transformers, read and written without holding all weights in memory.

config.json, model.safetensors.index.json, model-00001-of-00003.safetensors, ...
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from gpt.families import FAMILIES
from gpt.families.family import FREE, SIZE, UNUSED, VALUES, Family
from gpt.model.transformer import GPT
from gpt.pretrained.configuration import NO_SPECIAL_IDS, config_from_transformers, config_to_transformers, family_of
from gpt.pretrained.tensors import HEAD, WORDS, load_weights, source_of, to_transformers
from gpt.pretrained.tokenizer_files import (
    SPECIAL_IDS,
    check_fits,
    copy_tokenizer,
    has_tokenizer,
    special_ids,
    tokenizer_of_data,
    write_tokenizer,
)
from gpt.shape.config import ModelConfig, parameter_shapes
from parallel.validation.errors import ConfigError
from parallel.validation.files import SETTINGS_BYTES, read_limited
from zero.checkpoint.export import FILE_BYTES, write_folder
from zero.checkpoint.schema import Schema, check, parse_json, shown
from zero.checkpoint.tensor_file import TensorFile

CONFIG = "config.json"
ONE_MODEL = "give weights and configuration of one model"
logger = logging.getLogger(__name__)
# Keys that change the logits of models of transformers which are not supported, beside those of the families.
KEYS_OF_OTHERS = (
    *("alibi", "attention_multiplier", "attn_logit_softcapping", "clip_qkv", "embedding_multiplier"),
    *("final_logit_softcapping", "kv_lora_rank", "logit_scale", "logits_scaling", "no_rope_layers"),
    *("num_experts", "num_local_experts", "parallel_attn", "qk_layernorm", "query_pre_attn_scalar"),
    *("residual_multiplier", "scale_depth", "scale_emb", "use_parallel_residual", "use_qk_norm"),
)


class PretrainedWeights(Mapping[str, Tensor]):
    """The weights of a folder by this project's names. A tensor is read from its file each time it is looked up.

    Raises ConfigError if the names, shapes and types of the tensors are not those of a model with this configuration.
    """

    def __init__(self, folder: Path, files: list[Path], family: Family, config: ModelConfig):
        self._family, self._config = family, config
        self._locations: dict[str, tuple[TensorFile, str]] = {}  # by the names of transformers, without the prefix
        for file in map(TensorFile, files):
            for name in file.entries:
                if not name.endswith(family.ignored):
                    self._add(name.removeprefix(family.prefix), file, name)
        own_head = self._locations.pop(f"{HEAD}weight", None) if config.tied_head else None
        self._names = self._check_shapes(folder)
        if own_head is not None and not own_head[0].tensor(own_head[1]).equal(self[WORDS[0]]):
            raise ConfigError(
                f"{folder} has tie_word_embeddings=true, and a {own_head[1]} other than the embedding; correct either"
            )

    def _add(self, short: str, file: TensorFile, name: str) -> None:
        if short in self._locations:
            other, other_name = self._locations[short]
            raise ConfigError(
                f"{file.path} has {shown(name)} and {other.path} has {shown(other_name)}, which are the same "
                "parameter; keep the files of one model only"
            )
        dtype = file.entries[name].dtype
        if not dtype.is_floating_point:
            raise ConfigError(f"{file.path} has {shown(name)} in {dtype}, floats are needed; convert the weights")
        self._locations[short] = file, name

    def _check_shapes(self, folder: Path) -> list[str]:
        """Return this project's names of the parameters, after a check of all names and shapes."""
        names = []

        def expected() -> Iterator[tuple[str, tuple[int, ...]]]:
            for name, shape in parameter_shapes(self._config, self._config.vocab_size):
                names.append(name)
                source = source_of(name, self._family, self._config)
                yield from ((theirs, source.shape(shape)) for theirs in source.names)

        found = {short: file.entries[name].shape for short, (file, name) in self._locations.items()}
        check_shapes(found, expected(), folder)
        return names

    def __getitem__(self, name: str) -> Tensor:
        source = source_of(name, self._family, self._config)
        located = (self._locations[theirs] for theirs in source.names)
        return source.pack([file.tensor(theirs) for file, theirs in located])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Iterable[tuple[str, tuple[int, ...]]], origin: Path
) -> None:
    """Raise ConfigError unless the parameters of the file or folder `origin` have the expected names and shapes."""
    left = dict(found)
    for name, shape in expected:
        if (own := left.pop(name, None)) is None:
            raise ConfigError(f"{origin} lacks the parameter {name} of its configuration; {ONE_MODEL}")
        if tuple(own) != shape:
            raise ConfigError(
                f"{origin}: the parameter {name} has the shape {list(own)}, by its configuration {list(shape)}; "
                f"{ONE_MODEL}"
            )
    if left:
        raise ConfigError(
            f"{origin} has {shown(next(iter(left)))}, which is no parameter of its configuration; {ONE_MODEL}"
        )


def read_pretrained(folder: Path) -> tuple[ModelConfig, PretrainedWeights]:
    """Return the configuration and the weights of a folder. Raises ConfigError if it does not hold such weights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds 0 .safetensors files, 1 or more are needed; convert the weights first")
    with _remedy_in_errors(folder):
        family, config = _read_config(folder / CONFIG)
        return config, PretrainedWeights(folder, files, family, config)


@contextmanager
def _remedy_in_errors(folder: Path) -> Iterator[None]:
    """Add what to do to errors of this block that do not say it: those of files that are damaged."""
    try:
        yield
    except ConfigError as error:
        if "; " in str(error):
            raise
        raise ConfigError(f"{error}; copy the files of {folder} again, or give another folder") from error


def model_options(folder: Path) -> dict[str, Any]:
    """Return {option: value} of what the configuration of a folder says of its model, and ModelConfig does not default.

    Raises ConfigError if the configuration cannot be read, or is that of a model that is not supported.
    """
    with _remedy_in_errors(folder):
        _, config = _read_config(folder / CONFIG)
    values = {f"model.{field.name}": (getattr(config, field.name), field.default) for field in fields(ModelConfig)}
    options = {name: value for name, (value, default) in values.items() if value != default}
    if config.rope_scaling is not None:
        del options["model.rope_scaling"]
        options |= {f"model.rope_scaling.{name}": value for name, value in asdict(config.rope_scaling).items()}
    return options


def _read_config(path: Path) -> tuple[Family, ModelConfig]:
    try:
        content = read_limited(path, SETTINGS_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give a folder that has it beside the weights"
        ) from error
    found = {"model_type": "gpt2", **parse_json(content, {}, path)}
    check(found, {"model_type": str}, path)
    if found["model_type"] not in FAMILIES:
        raise ConfigError(
            f"{path}: the model has model_type={shown(found['model_type'])}, only {', '.join(FAMILIES)} are "
            "supported; choose another model"
        )
    family = FAMILIES[found["model_type"]]
    fixed = {key: value for each in FAMILIES.values() for key, value in each.fixed.items()}
    for name in sorted({*fixed, *KEYS_OF_OTHERS} & found.keys() - family.keys):
        is_neutral = not found[name] or found[name] == fixed.get(name) or (found[name] == 1 and found[name] is not True)
        if not is_neutral:
            raise ConfigError(
                f"{path}: the model has {name}={shown(found[name])}, which is no key of {family.configuration}, and "
                "changes the logits of models of other classes; correct model_type, or remove the key"
            )
    optional: dict[str, Schema] = {**{name: type(value) for name, value in family.fixed.items()}, **family.optional}
    schema = {name: of_value for name, of_value in optional.items() if found.get(name) is not None}
    check(found, {**dict.fromkeys(family.required, SIZE), **schema}, path)
    # Only these: transformers would look at the other keys too. A null is not the default of a key that is missing:
    # no window, for example. It does not take 1 for 1.0.
    known = {name: found[name] for name in [*family.required, *optional] if name in found}
    known |= {name: float(found[name]) for name, of_value in schema.items() if of_value is float}
    try:
        return family, config_from_transformers(_configuration(family, known))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _configuration(family: Family, known: Mapping[str, Any]) -> Any:
    """Return the configuration of transformers with these fields."""
    import transformers  # here, because a rank that trains does not need it and the import is slow

    try:
        return getattr(transformers, family.configuration)(**known, **NO_SPECIAL_IDS)
    except Exception as error:  # transformers checks the fields too, and raises what it likes
        raise ConfigError(f"transformers refuses it ({shown(str(error))}); choose another model") from error


def load_pretrained(model: GPT, folder: Path) -> None:
    """Load the weights of a folder into the model. Raises ConfigError if the folder's model is another one."""
    config, weights = read_pretrained(folder)
    may_differ = FREE - {"vocab_size"} | UNUSED[config.positions]
    for name in (field.name for field in fields(ModelConfig) if field.name not in may_differ):
        found, expected = (getattr(of, VALUES.get(name, name)) for of in (config, model.config))
        if found != expected:
            found, expected = (json.dumps(value, default=asdict) for value in (found, expected))
            raise ConfigError(f"model.{name}={expected}, but {folder} has {found}; choose model.{name}={found}")
    if model.config.seq_length > config.seq_length:
        raise ConfigError(
            f"model.seq_length={model.config.seq_length}, but {folder} has {config.seq_length} positions, or a sliding "
            f"window of as many, and windows are not supported; choose model.seq_length={config.seq_length} or less"
        )
    try:
        with _remedy_in_errors(folder):
            load_weights(model, weights)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error


def write_weights(
    folder: Path,
    config: ModelConfig,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer | None = None,
    file_bytes: int = FILE_BYTES,
    origin: Path | None = None,
) -> None:
    """Write whole parameters, by the names of this project, with what `write_config` writes, to a folder.

    Raises ConfigError if the folder already holds weights, because a reader would mix them with these, or if the
    tokenizer has more ids than the model, and OSError if a write fails.
    """
    check_fits(tokenizer, config)
    family, dtypes = family_of(config), []

    def converted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            dtypes.append(tensor.dtype)
            yield from to_transformers(name, tensor.detach().cpu(), family, config).items()

    write_folder(folder, converted(), file_bytes)
    write_config(folder, config, tokenizer, origin)
    _add_older_names(folder / CONFIG, dtypes)


def write_config(folder: Path, config: ModelConfig, tokenizer: Tokenizer | None, origin: Path | None = None) -> None:
    """Write the configuration of transformers, and the files of the tokenizer. Raises OSError if a write fails.

    `origin` is the folder of the initial weights. The model keeps its number of rotary positions, although the training
    may have had shorter sequences, and without a `tokenizer` its tokenizer and special tokens.
    """
    ids: Mapping[str, Any] = special_ids(tokenizer) if tokenizer else NO_SPECIAL_IDS
    if origin is not None:
        if config.positions == "rope":
            _, initial = _read_config(origin / CONFIG)
            config = replace(config, seq_length=max(config.seq_length, initial.seq_length))
        if tokenizer is None:
            content = parse_json(read_limited(origin / CONFIG, SETTINGS_BYTES), {}, origin / CONFIG)
            ids = {name: content.get(name) for name in SPECIAL_IDS}
    config_to_transformers(config, ids).save_pretrained(folder)
    if tokenizer:
        write_tokenizer(tokenizer, folder, config)
    elif origin is not None:
        copy_tokenizer(origin, folder)


def _add_older_names(path: Path, dtypes: Sequence[torch.dtype]) -> None:
    """Add the names of transformers 4 to a configuration: a reader of these would take defaults in silence."""
    content = json.loads(path.read_bytes())
    for dtype in dtypes[:1]:
        content.setdefault("torch_dtype", str(dtype).removeprefix("torch."))
    if rope := content.get("rope_parameters"):
        content["rope_theta"] = rope["rope_theta"]
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        content["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def companions(data: Mapping[str, Any], origin: str | None) -> tuple[Tokenizer | None, Path | None]:
    """Return what is exported beside weights: a tokenizer or None, and the folder of the initial weights or None.

    A folder with a tokenizer stands for that of the settings `data`. A warning is logged if it is no longer there.
    """
    folder = Path(origin) if origin else None
    if folder is not None and not (folder / CONFIG).is_file():
        logger.warning(
            "%s is not there: the exported folder has the tokenizer of the data, and as many positions as a sequence "
            "of the training; name the folder of the initial weights with --initial_weights",
            folder / CONFIG,
        )
        folder = None
    return None if has_tokenizer(folder) else tokenizer_of_data(data), folder
