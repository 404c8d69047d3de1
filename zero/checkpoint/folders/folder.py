"""Loads folders that DCP has written, from FSDP2 or from here, and ZeRO checkpoints of DeepSpeed, at any layout.

Each rank's tensors are filled in place, so a rank holds what it owns, and one stored piece of a tensor at a time.
Nothing of a folder is executed: its files may name few classes.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from parallel.validation.errors import ConfigError, first_line
from zero.checkpoint.folders.deepspeed_reader import GROWTH_TRACKER, DeepSpeedReader
from zero.checkpoint.folders.safe_reader import SafePlanner, SafeReader
from zero.checkpoint.folders.state import DistributedState
from zero.checkpoint.layout_file import is_complete, writer_of
from zero.checkpoint.schema import shown
from zero.core.step.loss_scale import LossScale
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer

# (name, tensor) here: the tensors of a folder that it is made of.
Naming = Callable[[str, Tensor], Mapping[str, Tensor]]


def same_name(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Return the tensor as that of the same name: the `Naming` of a folder of the same module."""
    return {name: tensor}


class DistributedFolder:
    """A folder of DCP or of DeepSpeed, whose tensors are found whatever words the program has put before their names.

    All ranks make the same calls. Raises ConfigError, on all of them, if the folder is not one of these.
    """

    def __init__(self, path: Path):
        if is_complete(path):
            raise ConfigError(f"{path} is a checkpoint that `save` of zero has written; load it by `load`")
        self.path = path
        self._reader = DeepSpeedReader(path) if writer_of(path) == "DeepSpeed" else SafeReader(path)
        self._stored = self._reader.read_metadata().state_dict_metadata

    def prefixes(self, name: str) -> list[str]:
        """Return what stands before the name in the keys that end in it."""
        return [key.removesuffix(name) for key in self._stored if key == name or key.endswith(f".{name}")]

    def names(self, prefix: str) -> set[str]:
        """Return the names of the tensors whose keys begin with `prefix`."""
        tensors = (key for key, entry in self._stored.items() if isinstance(entry, TensorStorageMetadata))
        return {key.removeprefix(prefix) for key in tensors if key.startswith(prefix)}

    def find(self, section: str, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors by their keys, in which all have the same words before them, and then `section`.

        Raises ConfigError unless the folder has them all, in these shapes.
        """
        if not wanted:  # states of SGD without momentum
            return {}
        first = section + next(iter(wanted))
        prefixes = self.prefixes(first)
        if len(prefixes) > 1:  # 1.0.weight ends in 0.weight too
            fitting = [each for each in prefixes if all(f"{each}{section}{name}" in self._stored for name in wanted)]
            prefixes = fitting or prefixes
        if len(prefixes) != 1:
            raise ConfigError(
                f"{self.path} has {len(prefixes)} tensors whose names end in {first}, and one is needed; choose the "
                "folder of this model and optimizer"
            )
        found = {f"{prefixes[0]}{section}{name}": tensor for name, tensor in wanted.items()}
        for key, tensor in found.items():
            entry = self._stored.get(key)
            there = list(entry.size) if isinstance(entry, TensorStorageMetadata) else "missing"
            if there != list(tensor.shape):
                raise ConfigError(
                    f"{self.path} is of another model or optimizer: {key} is {there} there and {list(tensor.shape)} "
                    "here; choose the folder of this one"
                )
        return found

    def load(self, wanted: dict[str, Any]) -> None:
        """Fill tensors by their keys in place; values that are no tensors take the place of None."""
        try:
            dcp.load(wanted, storage_reader=self._reader, planner=SafePlanner())
        except CheckpointException as error:
            (cause, _), *_ = error.failures.values()
            raise ConfigError(f"{self.path} is damaged ({first_line(cause)}); choose another folder") from error

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return values that are no tensors by their keys, and numbers, which may be tensors there."""
        wanted: dict[str, Any] = dict.fromkeys(keys)
        for key in wanted:
            entry = self._stored[key]
            if isinstance(entry, TensorStorageMetadata) and entry.size.numel() == 1:
                wanted[key] = torch.zeros(entry.size, dtype=torch.float64)
        self.load(wanted)
        return {key: value.item() if isinstance(value, Tensor) else value for key, value in wanted.items()}

    def number(self, name: str) -> float | None:
        """Return the finite, non-negative number whose key ends in `name`; None if the folder has no such key.

        Raises ConfigError if it is something else.
        """
        key = next((f"{prefix}{name}" for prefix in self.prefixes(name)), None)
        if key is None:
            return None
        value = self.values([key])[key]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(f"{self.path} is damaged ({key} is {shown(value)}); choose another folder")
        return value

    def count(self, name: str) -> int | None:
        """Return the number whose key ends in `name` as an integer."""
        value = self.number(name)
        return None if value is None else int(value)


def load_distributed(folder: str | Path, model: ZeroDataParallel, optimizer: ZeroOptimizer | None = None) -> None:
    """Load a folder that DCP has written, from a `DistributedState` or from FSDP2, or DeepSpeed, at any layout.

    All ranks call it. Without `optimizer` the weights alone are loaded. Raises ConfigError on all ranks, before
    anything is loaded, if the folder does not describe this model or its optimizer's states.
    """
    load_state(DistributedFolder(Path(folder).expanduser()), model, optimizer)


def load_state(
    there: DistributedFolder,
    model: ZeroDataParallel,
    optimizer: ZeroOptimizer | None,
    naming: Naming = same_name,
    *,
    with_settings: bool = True,
) -> None:
    """Load a folder whose tensors have the names that `naming` gives, with the settings of the optimizer's groups."""
    state = DistributedState(model, optimizer)
    content = state.state_dict()
    wanted: dict[str, Any] = there.find("", renamed(content["model"], naming))
    if optimizer is not None:
        states = there.find(
            "state.",
            {
                f"{theirs}.{kind}": part
                for name, kinds in content["optim"]["state"].items()
                for kind, value in kinds.items()
                for theirs, part in naming(name, value).items()
            },
        )
        wanted |= states
        if with_settings:
            _load_settings(there, content["optim"]["param_groups"], next(iter(states), ""))
        _load_loss_scale(there, optimizer.loss_scale)
    there.load(wanted)
    state.load_state_dict(content)


def renamed(tensors: Mapping[str, Tensor], naming: Naming) -> dict[str, Tensor]:
    """Return the tensors of a folder that these are made of."""
    return {theirs: part for name, tensor in tensors.items() for theirs, part in naming(name, tensor).items()}


def _load_settings(there: DistributedFolder, groups: Iterable[dict[str, Any]], a_state: str) -> None:
    """Give each group the settings that its first parameter has there, in the optimizer that has the key `a_state`.

    If the groups there do not name parameters, as those of DeepSpeed, they are in the same order.
    """
    begins = [begin for begin in there.prefixes("params") if "param_groups." in begin]
    begins.sort(key=lambda begin: a_state.startswith(f"{begin.partition('param_groups.')[0]}state."))  # the last counts
    members = there.values(f"{begin}params" for begin in begins).values()
    lists = [(begin, names) for begin, names in zip(begins, members, strict=True) if isinstance(names, list)]
    begin_of = {name: begin for begin, names in lists for name in names if isinstance(name, str)}
    for number, group in enumerate(groups):
        begin = begin_of.get(next(iter(group["params"]), ""), f"param_groups.{number}.")
        ends = [f"{begin}{name}" for name in group if name != "params"]
        values = there.values(prefix + end for end in ends for prefix in there.prefixes(end))
        group |= {key.rpartition(".")[2]: value for key, value in values.items()}


def _load_loss_scale(there: DistributedFolder, loss_scale: LossScale) -> None:
    """Load what torch's GradScaler has saved, or DeepSpeed; a loss scale that the folder does not have stays."""
    for prefix in there.prefixes(GROWTH_TRACKER) if loss_scale.is_dynamic else ():
        if scale := there.number(f"{prefix}scale"):
            loss_scale.state()["scale"].fill_(scale)
            loss_scale.state()["num_good"].fill_(there.count(f"{prefix}{GROWTH_TRACKER}") or 0)
