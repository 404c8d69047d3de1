"""Folders of GPT-2 weights in the format of transformers, read and written without holding all weights in memory.

config.json, model.safetensors.index.json, model-00001-of-00003.safetensors, ...
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from gpt.checkpoint.tokenizer_files import NO_TOKENIZER, TokenizerFiles
from gpt.model.huggingface import (
    FIXED_FIELDS,
    NO_SPECIAL_IDS,
    config_from_huggingface,
    config_to_huggingface,
    load_weights,
    name_from_huggingface,
    name_to_huggingface,
    shape_from_huggingface,
    tensor_from_huggingface,
    tensor_to_huggingface,
)
from gpt.model.transformer import GPT, ModelConfig, parameter_shapes
from parallel.errors import ConfigError
from zero.state.export import FILE_BYTES, WeightFiles
from zero.state.schema import Schema, check, parse_json, shown
from zero.state.tensor_file import TensorFile

CONFIG = "config.json"
SIZE = range(1, 2**31)
CONFIG_SCHEMA: Schema = dict.fromkeys(("n_layer", "n_embd", "n_head", "n_positions", "vocab_size"), SIZE)
OPTIONAL_SCHEMA: Schema = {
    "model_type": {"gpt2"},
    "n_inner": SIZE,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), float),
    **{name: {value} if isinstance(value, str) else type(value) for name, value in FIXED_FIELDS.items()},
}


class PretrainedWeights(Mapping[str, Tensor]):
    """The weights of a folder by this project's names. A tensor is read from its file each time it is looked up.

    Raises ConfigError if the names, shapes and types of the tensors are not those of a model with this configuration.
    """

    def __init__(self, folder: Path, files: list[Path], config: ModelConfig):
        self._num_heads = config.num_heads
        self._locations: dict[str, tuple[TensorFile, str]] = {}
        for file in map(TensorFile, files):
            for theirs in file.entries:
                if ours := name_from_huggingface(theirs):
                    self._add(ours, file, theirs)
        found = {ours: file.entries[theirs].shape for ours, (file, theirs) in self._locations.items()}
        shapes = {ours: shape_from_huggingface(ours, shape) for ours, shape in found.items()}
        check_shapes(shapes, parameter_shapes(config, config.vocab_size), folder)

    def _add(self, ours: str, file: TensorFile, theirs: str) -> None:
        if ours in self._locations:
            other, other_name = self._locations[ours]
            raise ConfigError(
                f"{file.path} has {shown(theirs)} and {other.path} has {shown(other_name)}, which are the same "
                "parameter; keep the files of one model only"
            )
        dtype = file.entries[theirs].dtype
        if not dtype.is_floating_point:
            raise ConfigError(f"{file.path} has {shown(theirs)} in {dtype}, floats are needed; convert the weights")
        self._locations[ours] = file, theirs

    def __getitem__(self, name: str) -> Tensor:
        file, theirs = self._locations[name]
        return tensor_from_huggingface(name, file.tensor(theirs), self._num_heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Iterable[tuple[str, tuple[int, ...]]], origin: Path
) -> None:
    """Raise ConfigError unless the parameters of the file or folder `origin` have the expected names and shapes."""
    left = dict(found)
    for name, shape in expected:
        if (own := left.pop(name, None)) is None:
            raise ConfigError(f"{origin} lacks the parameter {name}; its configuration is that of another model")
        if tuple(own) != shape:
            raise ConfigError(
                f"{origin}: the parameter {name} has the shape {list(own)}, by its configuration {list(shape)}; one of "
                "them is that of another model"
            )
    if left:
        raise ConfigError(f"{origin} has {shown(next(iter(left)))}, which is no parameter of the model it describes")


def read_pretrained(folder: Path) -> tuple[ModelConfig, PretrainedWeights]:
    """Return the configuration and the weights of a folder. Raises ConfigError if it does not hold GPT-2 weights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds 0 .safetensors files, 1 or more are needed; convert the weights first")
    config = _read_config(folder / CONFIG)
    return config, PretrainedWeights(folder, files, config)


def _read_config(path: Path) -> ModelConfig:
    from transformers import GPT2Config  # here, because a rank that trains does not need it and the import is slow

    try:
        content = parse_json(path.read_bytes(), CONFIG_SCHEMA, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; it describes the weights beside it") from error
    content = {name: value for name, value in content.items() if value is not None}
    optional = {name: schema for name, schema in OPTIONAL_SCHEMA.items() if name in content}
    check(content, optional, path)
    # Only what is checked: transformers would look at the other keys too. It does not take 1 for 1.0.
    known = {name: content[name] for name in [*CONFIG_SCHEMA, *optional] if name != "model_type"}
    known |= {name: float(content[name]) for name, schema in optional.items() if schema is float}
    try:
        return config_from_huggingface(GPT2Config(**known))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_pretrained(model: GPT, folder: Path) -> None:
    """Load the weights of a folder into the model. Raises ConfigError if the folder's model has another shape."""
    config, weights = read_pretrained(folder)
    for name in ("num_layers", "hidden_size", "num_heads", "seq_length", "vocab_size"):
        found, expected = getattr(config, name), getattr(model.config, name)
        if found != expected:
            raise ConfigError(f"model.{name}={expected}, but {folder} has {found}; choose model.{name}={found}")
    try:
        load_weights(model, weights)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error


class WeightsWriter:
    """A writer of a folder of weights, by the names of this project, of its configuration and its tokenizer.

    Raises ConfigError if the folder already holds weights, because a reader would mix them with these.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        file_bytes: int = FILE_BYTES,
        tokenizer: TokenizerFiles = NO_TOKENIZER,
    ):
        tokenizer.check_fits(config)
        self._folder, self._config, self._tokenizer = folder, config, tokenizer
        self._files = WeightFiles(folder, file_bytes)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole parameter, on any device. Raises OSError if a write fails."""
        self._files.add(*to_huggingface(name, tensor, self._config))

    def finish(self) -> None:
        """Write the rest of the tensors, the index and the configuration. Raises OSError if a write fails."""
        self._files.finish()
        write_config(self._folder, self._config, self._tokenizer)


def to_huggingface(name: str, tensor: Tensor, config: ModelConfig) -> tuple[str, Tensor]:
    """Return the name and the value of a parameter in the format of transformers, in host memory."""
    return name_to_huggingface(name), tensor_to_huggingface(name, tensor.detach().cpu(), config)


def write_config(folder: Path, config: ModelConfig, tokenizer: TokenizerFiles) -> None:
    """Write the configuration of transformers, and the files of the tokenizer. Raises OSError if a write fails."""
    config_to_huggingface(config, tokenizer.special_ids or NO_SPECIAL_IDS).save_pretrained(folder)
    tokenizer.write(folder, config)
