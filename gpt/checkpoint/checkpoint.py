"""Checkpoints: what a folder of them holds, and going on from one, at whatever layout.

    RUN/checkpoints/step-00000100/layout.json                what lies where, and how far the run had come
                                  rank-00000.safetensors     flat shards that rank 0 owns, and its random states
    RUN/checkpoints/latest                                   the name of the newest complete one

A replica of another rank's shards writes its random states only. `gpt/checkpoint/saver.py` writes these files.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.build import TrainState
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

FORMAT = 2
LAYOUT, LATEST = "layout.json", "latest"


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    consumed_samples: int = 0


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def find(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `checkpoint.resume` asks for; None: start anew. Raises ConfigError if it isn't there."""
    if resume == "never":
        return None
    if resume == "auto":
        return newest(folder)
    if not (Path(resume) / LAYOUT).is_file():
        raise ConfigError(f"checkpoint.resume={resume} holds no complete checkpoint; give the folder of one, or auto")
    return Path(resume)


def newest(folder: Path) -> Path | None:
    latest = folder / LATEST
    named = folder / latest.read_text().strip() if latest.is_file() else None
    if named and (named / LAYOUT).is_file():
        return named
    return next(reversed(complete_checkpoints(folder)), None)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Oldest first; a checkpoint has its final name only when all of it is on disk."""
    return sorted(path.parent for path in folder.glob(f"step-*/{LAYOUT}"))


def set_aside_later(folder: Path, step: int) -> None:
    """A run that goes on from `step`, or begins, makes those of later steps anew; what is there keeps another name."""
    for path in complete_checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            path.rename(first_free(path.with_name(f"old-{{}}-{path.name}")))


def remove_partial(folder: Path) -> None:
    """What interrupted saves have left."""
    for path in folder.glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def owned_tensors(state: TrainState) -> dict[str, Tensor]:
    """What this rank writes: its random states and its own state; its shards too, unless it is a replica."""
    tensors = {"random.cpu": torch.get_rng_state()}
    if state.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    tensors |= common_state(state.model, state.optimizer) | _guard_state(state)
    if state.model.replica_axis.rank == 0:
        tensors |= owned_state(state.model, state.optimizer)
    return tensors


def describe(state: TrainState, progress: Progress) -> dict[str, Any]:
    """What layout.json says. The same on every rank, and no larger for more of them."""
    return {
        "format": FORMAT,
        "progress": asdict(progress),
        "model": asdict(state.config),
        "optimizer": type(state.optimizer.inner).__name__,
        "optimizer_counters": group_counters(state.optimizer),
        "state": describe_state(state.model, state.mesh.data.size, state.mesh.tensor.size),
    }


def read_layout(checkpoint: Path) -> dict[str, Any]:
    """Raises ConfigError where the file is damaged, or of another format."""
    layout = read_json(checkpoint / LAYOUT)
    if layout["format"] == 1:  # format 2 renamed one key
        for buffer in layout["state"]["buffers"]:
            buffer["bucket_numel"] = buffer.pop("window_numel")
        layout["format"] = FORMAT
    if layout["format"] != FORMAT:
        raise ConfigError(f"checkpoint {checkpoint} has format {layout['format']}, this program reads {FORMAT}")
    return layout


def load(checkpoint: Path, state: TrainState) -> Progress:
    """Go on where the checkpoint was written: to the bit at the same layout, to rounding at any other.

    Raises ConfigError if it holds another model, or is damaged. Every file is read once more for its checksum, by one
    of the ranks.
    """
    mesh = state.mesh
    try:
        layout = read_layout(checkpoint)
        saved = SavedState(checkpoint, layout["state"])
        for number in range(mesh.rank, saved.num_files, mesh.size):
            verify(rank_file(checkpoint, number))
    except ConfigError as error:
        raise ConfigError(f"{error}; {_way_out(checkpoint)}") from error
    _check_fits(checkpoint, layout, describe(state, Progress()))
    mesh.barrier()  # no rank goes on while another finds damage
    load_owned_state(state.model, state.optimizer, saved, TensorRank(mesh.tensor.rank, mesh.tensor.size))
    for group, counters in zip(state.optimizer.inner.param_groups, layout["optimizer_counters"], strict=True):
        group.update(counters)
    _load_own(saved, state)
    return Progress(**layout["progress"])


def _load_own(saved: SavedState, state: TrainState) -> None:
    """From the rank whose place this one takes. Data-parallel ranks that are new keep the random stream of a start:
    were they to share another's, they would drop the same activations.
    """
    mesh = state.mesh
    place = mesh.data.rank % saved.data_size * saved.tensor_size + mesh.tensor.rank % saved.tensor_size
    file = saved.file(place)
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
    saved_shapes, shapes = full_shapes(saved["state"]), full_shapes(expected["state"])
    for name in [*shapes, *saved_shapes]:
        if saved_shapes.get(name) != shapes.get(name):
            raise ConfigError(
                f"checkpoint {checkpoint} is of another model: {name} is {saved_shapes.get(name, 'missing')} there and "
                f"{shapes.get(name, 'missing')} in this run; take model.* from its config.yaml, or another run.dir"
            )
    if saved["optimizer"] != expected["optimizer"]:
        raise ConfigError(
            f"checkpoint {checkpoint} was saved with the optimizer {saved['optimizer']}, this run has "
            f"{expected['optimizer']}; start it where the same one is installed"
        )


def _way_out(damaged: Path) -> str:
    before = [path for path in complete_checkpoints(damaged.parent) if path.name < damaged.name]
    if before:
        return f"go on from the checkpoint before with --checkpoint.resume={before[-1]}"
    return "there is no checkpoint before it; start anew with --checkpoint.resume=never"
