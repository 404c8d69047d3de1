"""Checkpoints: the files of one, and how a run with any stage, tensor size and number of ranks resumes from it.

    RUN/checkpoints/step-00000100/layout.json                where each tensor is stored, and the progress of the run
                                  rank-00000.safetensors     the flat shards that rank 0 owns, and its random states
    RUN/checkpoints/latest                                   the name of the newest complete checkpoint

A rank whose shards are replicas of another rank's writes its random states only. `gpt/checkpoint/saver.py` writes the
files.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.build import TrainState
from gpt.checkpoint.adam import are_alike, load_counters
from gpt.run_folder.files import first_free
from parallel.errors import ConfigError
from zero.state.owned_state import (
    common_state,
    describe_state,
    group_counters,
    load_common_state,
    load_owned_state,
    owned_state,
)
from zero.state.saved_state import SavedState, TensorRank, full_shapes, rank_file
from zero.state.sealed_file import read_json, verify

FORMAT = 3
LAYOUT, LATEST = "layout.json", "latest"


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    step: int = 0
    consumed_samples: int = 0


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def find(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint that the setting `checkpoint.resume` selects, or None to start from the beginning.

    Raises ConfigError if it is the name of a folder that does not hold a complete checkpoint.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return newest(folder)
    if not (Path(resume) / LAYOUT).is_file():
        raise ConfigError(f"checkpoint.resume={resume} holds no complete checkpoint; give the folder of one, or auto")
    return Path(resume)


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of the folder, or None if there is none."""
    latest = folder / LATEST
    named = folder / latest.read_text().strip() if latest.is_file() else None
    if named and (named / LAYOUT).is_file():
        return named
    return next(reversed(complete_checkpoints(folder)), None)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of the folder, oldest first: incomplete ones have another name."""
    return sorted(path.parent for path in folder.glob(f"step-*/{LAYOUT}"))


def set_aside_later(folder: Path, step: int) -> None:
    """Rename the checkpoints of steps after `step`, because the run will save these steps again."""
    for path in complete_checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            path.rename(first_free(path.with_name(f"old-{{}}-{path.name}")))


def remove_partial(folder: Path) -> None:
    """Delete what interrupted saves have left."""
    for path in folder.glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True)


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


def describe(state: TrainState, progress: Progress) -> dict[str, Any]:
    """Return the content of layout.json, which is the same on every rank, and as long for any number of ranks."""
    return {
        "format": FORMAT,
        "progress": asdict(progress),
        "model": asdict(state.config),
        "optimizer": type(state.optimizer.inner).__name__,
        "optimizer_counters": group_counters(state.optimizer),
        "state": describe_state(state.model, state.mesh.data.size, state.mesh.tensor.size),
    }


def read_layout(checkpoint: Path) -> dict[str, Any]:
    """Return the content of layout.json. Raises ConfigError if the file is damaged, or has another format."""
    layout = read_json(checkpoint / LAYOUT)
    if layout["format"] == 2:  # format 3 has another name for one key
        for buffer in layout["state"]["buffers"]:
            buffer["bucket_numel"] = buffer.pop("window_numel")
        layout["format"] = FORMAT
    if layout["format"] != FORMAT:
        raise ConfigError(
            f"checkpoint {checkpoint} has format {layout['format']}, this program reads {FORMAT}; resume it with the "
            "version of the program that wrote it"
        )
    return layout


def load(checkpoint: Path, state: TrainState) -> Progress:
    """Load the checkpoint into `state` and return its progress.

    The run then continues as it would have without the interruption: bit for bit with the same stage, mesh and buckets,
    up to rounding with others. The ranks share the verification of all files by checksum. Raises ConfigError if the
    checkpoint is damaged or holds another model.
    """
    mesh = state.mesh
    try:
        layout = read_layout(checkpoint)
        saved = SavedState(checkpoint, layout["state"])
        for number in range(mesh.rank, saved.num_files, mesh.size):
            verify(rank_file(checkpoint, number))
    except ConfigError as error:
        raise ConfigError(f"{error}; {_remedy(checkpoint)}") from error
    _check_fits(checkpoint, layout, describe(state, Progress()))
    # Before anything is loaded: a rank that finds damage does not reach the barrier, so the others do not continue.
    mesh.barrier()
    load_owned_state(state.model, state.optimizer, saved, TensorRank(mesh.tensor.rank, mesh.tensor.size))
    load_counters(state.optimizer, saved, layout["optimizer"], layout["optimizer_counters"])
    _load_own(saved, state)
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
            tensor.copy_(file.tensor(name))
    if mesh.data.rank < saved.data_size:
        torch.set_rng_state(file.tensor("random.cpu"))
        if state.device.type == "cuda" and "random.cuda" in file.entries:
            torch.cuda.set_rng_state(file.tensor("random.cuda"))


def _guard_state(state: TrainState) -> dict[str, Tensor]:
    return {f"guard.{name}": tensor for name, tensor in state.guard.state().items()} if state.guard else {}


def _check_fits(checkpoint: Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise ConfigError unless the checkpoint has the parameters and the optimizer of this run."""
    saved_shapes, shapes = full_shapes(saved["state"]), full_shapes(expected["state"])
    for name in [*shapes, *saved_shapes]:
        if saved_shapes.get(name) != shapes.get(name):
            raise ConfigError(
                f"checkpoint {checkpoint} is of another model: {name} is {saved_shapes.get(name, 'missing')} there and "
                f"{shapes.get(name, 'missing')} in this run; take model.* from its config.yaml, or another run.dir"
            )
    if not are_alike(saved["optimizer"], expected["optimizer"]):
        raise ConfigError(
            f"checkpoint {checkpoint} was saved with the optimizer {saved['optimizer']}, this run has "
            f"{expected['optimizer']}; resume it with the program that wrote it"
        )


def _remedy(damaged: Path) -> str:
    """Return what to do about a damaged checkpoint."""
    before = [path for path in complete_checkpoints(damaged.parent) if path.name < damaged.name]
    if before:
        return f"resume from the checkpoint before it with --checkpoint.resume={before[-1]}"
    return "there is no checkpoint before it; start from the beginning with --checkpoint.resume=never"
