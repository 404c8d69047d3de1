"""Folders of GPT-2 weights in the format of transformers, read and written without holding all weights in memory.

config.json, model.safetensors.index.json, model-00001-of-00003.safetensors, ...
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from gpt.model.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    load_weights,
    name_from_huggingface,
    name_to_huggingface,
    tensor_from_huggingface,
    tensor_to_huggingface,
)
from gpt.model.transformer import GPT, ModelConfig
from parallel.errors import ConfigError
from zero.state.tensor_file import TensorFile, write_tensors

FILE_BYTES = 2**28
INDEX = "model.safetensors.index.json"


class PretrainedWeights(Mapping[str, Tensor]):
    """The weights of a folder by this project's names. A tensor is read from its file each time it is looked up."""

    def __init__(self, files: list[Path], num_heads: int):
        self._num_heads = num_heads
        self._files = [TensorFile(file) for file in files]
        self._locations = {
            ours: (file, theirs)
            for file in self._files
            for theirs in file.entries
            if (ours := name_from_huggingface(theirs))
        }

    def __getitem__(self, name: str) -> Tensor:
        file, theirs = self._locations[name]
        return tensor_from_huggingface(name, file.tensor(theirs), self._num_heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)


def read_pretrained(folder: Path) -> tuple[ModelConfig, PretrainedWeights]:
    """Return the configuration and the weights of a folder. Raises ConfigError if it does not hold GPT-2 weights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds 0 .safetensors files, 1 or more are needed; convert the weights first")
    from transformers import GPT2Config  # here, because a rank that trains does not need it and the import is slow

    config = config_from_huggingface(GPT2Config.from_pretrained(folder))
    return config, PretrainedWeights(files, config.num_heads)


def load_pretrained(model: GPT, folder: Path) -> None:
    """Load the weights of a folder into the model. Raises ConfigError if the folder's model has another shape."""
    config, weights = read_pretrained(folder)
    for name in ("num_layers", "hidden_size", "num_heads", "seq_length", "vocab_size"):
        found, expected = getattr(config, name), getattr(model.config, name)
        if found != expected:
            raise ConfigError(f"model.{name}={expected}, but {folder} has {found}; choose model.{name}={found}")
    load_weights(model, weights)


class WeightsWriter:
    """A writer of a folder of weights, tensor by tensor. It holds at most `file_bytes` of them, or one larger tensor.

    Raises ConfigError if the folder already holds weights, because a reader would mix them with these.
    """

    def __init__(self, folder: Path, config: ModelConfig, file_bytes: int = FILE_BYTES):
        self._folder, self._config, self._file_bytes = folder, config, file_bytes
        self._held: dict[str, Tensor] = {}
        self._files: list[dict[str, int]] = []  # {name of a tensor: bytes} for each file that is written
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.safetensors")):
            raise ConfigError(f"{folder} holds .safetensors files already; choose another folder, or empty it")

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole parameter, on any device, by its name in this project. Raises OSError if a write fails."""
        # A copy, because the memory of the parameter's unit is freed before the file is written.
        theirs = tensor_to_huggingface(name, tensor.detach().cpu(), self._config).clone()
        if self._held_bytes + theirs.nbytes > self._file_bytes:
            self._write_held()
        self._held[name_to_huggingface(name)] = theirs

    def finish(self) -> None:
        """Write the rest of the tensors, the index and the configuration. Raises OSError if a write fails."""
        self._write_held()
        # Files get the names that readers look for when all of them are written: the names contain their number.
        names = [f"model-{n:05d}-of-{len(self._files):05d}.safetensors" for n in range(1, len(self._files) + 1)]
        for number, name in enumerate(names):
            self._partial(number).rename(self._folder / name)
        index = {
            "metadata": {"total_size": sum(sum(held.values()) for held in self._files)},
            "weight_map": {tensor: name for name, held in zip(names, self._files, strict=True) for tensor in held},
        }
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))
        config_to_huggingface(self._config).save_pretrained(self._folder)

    @property
    def _held_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())

    def _write_held(self) -> None:
        if self._held:
            write_tensors(self._partial(len(self._files)), self._held, {"format": "pt"})
            self._files.append({name: tensor.nbytes for name, tensor in self._held.items()})
            self._held = {}

    def _partial(self, number: int) -> Path:
        return self._folder / f".model-{number}.partial"
