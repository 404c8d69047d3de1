"""The state that one rank saves of a model and its optimizer, and loads from a checkpoint of any layout.

"random.cpu", "random.cuda"    the states of torch's random generators; the other names are those of owned_state.py
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.errors import ConfigError, check_type
from parallel.mesh import Axis, Mesh
from parallel.tensor.split_parameters import split_dims
from zero.engine import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.state.adam import are_alike, load_counters
from zero.state.layout_file import FORMAT, verify_file
from zero.state.owned_state import (
    common_state,
    describe_state,
    group_counters,
    load_common_state,
    load_owned_state,
    owned_state,
)
from zero.state.saved_state import SavedFile, SavedState, TensorRank, saved_parameters

NO_OPTIMIZER = ""  # in the place of an optimizer's class


@dataclass(frozen=True)
class RankState:
    """A model and its optimizer as they are saved and loaded; without it, the weights and buffers alone.

    `others` are further tensors, of any name, that every rank saves and loads in place.
    """

    model: ZeroDataParallel
    optimizer: ZeroOptimizer | None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_type("`model` of a checkpoint", self.model, ZeroDataParallel, "give what wrapping the module returned")
        if self.optimizer is not None:
            check_type("`optimizer` of a checkpoint", self.optimizer, ZeroOptimizer, "give None for the weights alone")
        elif split_dims(self.model.module):
            raise ConfigError("a model that is split along a tensor axis needs its optimizer, which knows that axis")

    @property
    def mesh(self) -> Mesh:
        """The ranks that save together."""
        tensor = self.optimizer.tensor if self.optimizer else Axis.trivial("tensor")
        return Mesh(self.model.data, tensor, self.model.data.log)

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return self.model.offload.device

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that this rank writes to its file.

        They are its random states, the state that every rank has, and its shards unless they are replicas of another
        rank's. They are not copies.
        """
        tensors = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        tensors |= common_state(self.model, self.optimizer) | dict(self.others)
        if self.model.replica_axis.rank == 0:
            tensors |= owned_state(self.model, self.optimizer)
        return tensors

    def describe(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of layout.json without the seals; `content` is what the program adds to it."""
        return {
            "format": FORMAT,
            **content,
            "optimizer": type(self.optimizer.inner).__name__ if self.optimizer else NO_OPTIMIZER,
            "optimizer_counters": group_counters(self.optimizer) if self.optimizer else [],
            "state": describe_state(self.model, self.mesh.data.size, self.mesh.tensor.size),
        }

    def check_fits(self, checkpoint: Path, layout: Mapping[str, Any], remedy: str) -> None:
        """Raise ConfigError unless the checkpoint has these parameters and an optimizer of this class."""
        present = self.describe({})
        there, here = (
            {name: list(parameter.shape) for name, parameter in saved_parameters(description["state"]).items()}
            for description in (layout, present)
        )
        for name in [*here, *there]:
            if there.get(name) != here.get(name):
                raise ConfigError(
                    f"checkpoint {checkpoint} is of another model: {name} is {there.get(name, 'missing')} there and "
                    f"{here.get(name, 'missing')} in this run; {remedy}"
                )
        if self.optimizer is not None and layout["optimizer"] == NO_OPTIMIZER:
            raise ConfigError(f"checkpoint {checkpoint} has weights alone; load it without an optimizer")
        if self.optimizer is not None and not are_alike(layout["optimizer"], present["optimizer"]):
            raise ConfigError(
                f"checkpoint {checkpoint} was saved with the optimizer {layout['optimizer']}, this run has "
                f"{present['optimizer']}; resume it with the program that wrote it"
            )

    def load(self, checkpoint: Path, layout: Mapping[str, Any], save: str) -> None:
        """Load a checkpoint that fits. The ranks share the verification of all files by checksum.

        `save` names the save, as in the files' origins. Raises ConfigError if the checkpoint is damaged.
        """
        mesh = self.mesh
        for number in range(mesh.rank, len(layout["files"]), mesh.size):
            verify_file(checkpoint, layout, number, save)
        # Before anything is loaded: a rank that finds damage does not reach the barrier, so the others do not continue.
        mesh.barrier()
        self.load_verified(SavedState(checkpoint, layout["state"]), layout)

    def load_verified(self, saved: SavedState, layout: Mapping[str, Any]) -> None:
        """Load a checkpoint that fits and is undamaged. All ranks call it."""
        mesh = self.mesh
        tensor = TensorRank(mesh.tensor.rank, mesh.tensor.size, split_dims(self.model.module))
        load_owned_state(self.model, self.optimizer, saved, tensor)
        if self.optimizer is not None:
            load_counters(self.optimizer, saved, layout["optimizer"], layout["optimizer_counters"])
        self._load_own(saved)

    def number_of_own(self, saved: SavedState) -> int:
        """Return the number of the file with what is not sharded: that of the saved rank at the same coordinates.

        They are taken modulo the sizes of the saved mesh.
        """
        mesh = self.mesh
        return mesh.data.rank % saved.data_size * saved.tensor_size + mesh.tensor.rank % saved.tensor_size

    def _load_own(self, saved: SavedState) -> None:
        """Load what is not sharded: module buffers, the loss scale, `others`, and this rank's random streams.

        Data-parallel ranks beyond the saved ones keep the random stream of a new run: with another rank's stream they
        would drop the same activations as that rank.
        """
        file = saved.file(self.number_of_own(saved))
        load_common_state(self.model, self.optimizer, file)
        file.load_present(self.others)
        if self.optimizer is not None and self.mesh.data.rank < saved.data_size:
            _set_random_state(file, "random.cpu", torch.set_rng_state)
            if self.device.type == "cuda" and "random.cuda" in file.entries:
                _set_random_state(file, "random.cuda", torch.cuda.set_rng_state)


def _set_random_state(file: SavedFile, name: str, set_state: Callable[[Tensor], None]) -> None:
    try:
        set_state(file.tensor(name))
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{file.path} is damaged: {name} is not the state of a random generator") from error
