"""Checkpoints: the files of one, and how a run with any stage, tensor size and number of ranks resumes from it.

    RUN/checkpoints/step-00000100/layout.json                where each tensor is stored, and the progress of the run
                                  rank-00000.safetensors     the flat shards that rank 0 owns, and its random states
    RUN/checkpoints/latest                                   the name of the newest complete checkpoint

A rank whose shards are replicas of another rank's writes its random states only. `gpt/checkpoint/saver.py` writes the
files, `gpt/checkpoint/layout.py` describes them, and `gpt/checkpoint/folder.py` finds them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.build import TrainState
from gpt.checkpoint.adam import load_counters
from gpt.checkpoint.folder import checkpoints, is_complete, step_in_name
from gpt.checkpoint.layout import Progress, changed_data, check_fits, read_layout, verify_file
from parallel.errors import ConfigError
from zero.state.owned_state import common_state, load_common_state, load_owned_state, owned_state
from zero.state.saved_state import SavedFile, SavedState, TensorRank

logger = logging.getLogger(__name__)


def owned_tensors(state: TrainState) -> dict[str, Tensor]:
    """Return the tensors that this rank writes to its file.

    They are its random states, the state that every rank has, and its shards unless they are replicas of another
    rank's.
    """
    tensors = {"random.cpu": torch.get_rng_state()}
    if state.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    tensors |= common_state(state.model, state.optimizer) | _guard_state(state)
    if state.model.replica_axis.rank == 0:
        tensors |= owned_state(state.model, state.optimizer)
    return tensors


def load(checkpoint: Path, state: TrainState, data: Mapping[str, Any] | None = None) -> Progress:
    """Load the checkpoint into `state` and return its progress.

    The run then continues as it would have without the interruption: bit for bit with the same stage, mesh and buckets,
    up to rounding with others. The ranks share the verification of all files by checksum. A warning is logged for each
    of the settings `data`, which determine the order of samples, that has changed. Raises ConfigError if the checkpoint
    is damaged or holds another model.
    """
    mesh = state.mesh
    with _remedy_in_errors(checkpoint):
        layout = read_layout(checkpoint)
    check_fits(checkpoint, layout, state)
    with _remedy_in_errors(checkpoint):
        for number in range(mesh.rank, len(layout["files"]), mesh.size):
            verify_file(checkpoint, layout, number)
        # Before anything is loaded: a rank that finds damage does not reach the barrier, so the others do not continue.
        mesh.barrier()
        saved = SavedState(checkpoint, layout["state"])
        load_owned_state(state.model, state.optimizer, saved, TensorRank(mesh.tensor.rank, mesh.tensor.size))
        load_counters(state.optimizer, saved, layout["optimizer"], layout["optimizer_counters"])
        _load_own(saved, state)
    for change in changed_data(layout, data or {}):
        logger.warning("%s", change)
    return Progress(**layout["progress"])


def _load_own(saved: SavedState, state: TrainState) -> None:
    """Load what is not sharded: module buffers, the loss scale, the loss guard, and this rank's random streams.

    They are read from the file of the saved rank at the same coordinates, modulo the sizes of the saved mesh.
    Data-parallel ranks beyond the saved ones keep the random stream of a new run: with another rank's stream they would
    drop the same activations as that rank.
    """
    mesh = state.mesh
    number = mesh.data.rank % saved.data_size * saved.tensor_size + mesh.tensor.rank % saved.tensor_size
    file = saved.file(number)
    load_common_state(state.model, state.optimizer, file)
    for name, tensor in _guard_state(state).items():
        if name in file.entries:
            file.load(name, tensor)
    if mesh.data.rank < saved.data_size:
        _set_random_state(file, "random.cpu", torch.set_rng_state)
        if state.device.type == "cuda" and "random.cuda" in file.entries:
            _set_random_state(file, "random.cuda", torch.cuda.set_rng_state)


def _set_random_state(file: SavedFile, name: str, set_state: Callable[[Tensor], None]) -> None:
    try:
        set_state(file.tensor(name))
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{file.path} is damaged: {name} is not the state of a random generator") from error


def _guard_state(state: TrainState) -> dict[str, Tensor]:
    return {f"guard.{name}": tensor for name, tensor in state.guard.state().items()} if state.guard else {}


@contextmanager
def _remedy_in_errors(checkpoint: Path) -> Iterator[None]:
    """Add to the message of a ConfigError what to do about a damaged checkpoint."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}; {_remedy(checkpoint)}") from error


def _remedy(damaged: Path) -> str:
    """Return what to do about a damaged checkpoint."""
    step = step_in_name(damaged) or 0
    before = [path for path in checkpoints(damaged.parent) if is_complete(path) and (step_in_name(path) or 0) < step]
    if before:
        return f"resume from the checkpoint before it with --checkpoint.resume={before[-1]}"
    return "there is no checkpoint before it; start from the beginning with --checkpoint.resume=never"
