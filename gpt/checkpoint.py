"""Checkpoints that a crash cannot harm: written beside, flushed, then renamed.

    RUN/checkpoints/step-00000100/layout.json                what lies where, and how far the run had come
                                  rank-00000.safetensors     flat shards that rank 0 owns, and its random states
    RUN/checkpoints/latest                                   the name of the newest complete one

A replica of another rank's shard is not written again: `layout.json` says whose file a rank reads.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt.build import Parts
from parallel.errors import ConfigError
from zero.state import describe_layout, group_counters, load_owned_state, owned_state

FORMAT = 1


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    consumed_samples: int = 0


def save(folder: Path, parts: Parts, progress: Progress, rank: int, keep: int) -> Path:
    """Write the checkpoint of `progress` into `folder`, and drop all but the newest `keep`. Called by every rank."""
    final = folder / f"step-{progress.step:08d}"
    partial = folder / f".{final.name}.partial"
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # what an interrupted save has left
            partial.mkdir(parents=True)
        parts.mesh.barrier()
        _save_rank(_rank_file(partial, rank), parts)
        parts.mesh.barrier()
        if rank == 0:
            _write_durably(partial / "layout.json", json.dumps(_layout(parts, progress), indent=1))
            partial.rename(final)
            _write_durably(folder / "latest", final.name)
            for old in complete_checkpoints(folder)[:-keep]:
                shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"checkpoint of step {progress.step} cannot be written to {partial}: {reason}; "
            "make room or choose another run.dir (the checkpoint before it is untouched)"
        ) from error
    parts.mesh.barrier()
    return final


def find(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `checkpoint.resume` asks for; None: start anew. Raises ConfigError if it isn't there."""
    if resume == "never":
        return None
    if resume != "auto":
        if not (Path(resume) / "layout.json").is_file():
            raise ConfigError(
                f"checkpoint.resume={resume} holds no complete checkpoint; give the folder of one, or auto"
            )
        return Path(resume)
    latest = folder / "latest"
    named = folder / latest.read_text().strip() if latest.is_file() else None
    if named and (named / "layout.json").is_file():
        return named
    return next(reversed(complete_checkpoints(folder)), None)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Oldest first; a checkpoint has its final name only when all of it is on disk."""
    return sorted(path.parent for path in folder.glob("step-*/layout.json"))


def set_aside_later(folder: Path, step: int) -> None:
    """A run that goes on from `step`, or begins, makes those of later steps anew; what is there keeps another name."""
    for path in complete_checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            number = 1
            while (aside := path.with_name(f"old-{number}-{path.name}")).exists():
                number += 1
            path.rename(aside)


def load(checkpoint: Path, parts: Parts, rank: int) -> Progress:
    """Continue exactly where the checkpoint was written. Raises ConfigError if it holds another model or layout."""
    layout = json.loads((checkpoint / "layout.json").read_text())
    _check_fits(checkpoint, layout, _layout(parts, Progress()))
    try:
        own = load_file(_rank_file(checkpoint, rank))
        shard_rank = layout["shard_files"][rank]
        saved = own if shard_rank == rank else load_file(_rank_file(checkpoint, shard_rank))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"checkpoint {checkpoint} is damaged: {error}; choose the one before it") from error
    load_owned_state(parts.model, parts.optimizer, saved)
    for group, counters in zip(parts.optimizer.inner.param_groups, layout["optimizer_counters"], strict=True):
        group.update(counters)
    torch.set_rng_state(own["random.cpu"])
    if parts.device.type == "cuda":
        torch.cuda.set_rng_state(own["random.cuda"])
    return Progress(**layout["progress"])


def _save_rank(path: Path, parts: Parts) -> None:
    tensors: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
    if parts.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    if parts.model.replica_axis.rank == 0:
        tensors |= owned_state(parts.model, parts.optimizer)
    save_file(tensors, path)
    _flush(path)


def _layout(parts: Parts, progress: Progress) -> dict[str, Any]:
    """What decides whether a checkpoint fits a run, and where a run goes on."""
    model, mesh = parts.model, parts.mesh
    num_owners = model.shard_axis.size * mesh.tensor.size  # shards lie on consecutive ranks, then their replicas
    ranks = range(mesh.data.size * mesh.tensor.size)
    return {
        "format": FORMAT,
        "progress": asdict(progress),
        "device": parts.device.type,
        "optimizer": type(parts.optimizer.inner).__name__,
        "data_size": mesh.data.size,
        "tensor_size": mesh.tensor.size,
        "num_shards": model.shard_axis.size,
        "shard_files": [rank % num_owners for rank in ranks],  # the first of the replicas has written it
        "buffers": describe_layout(model),
        "optimizer_counters": group_counters(parts.optimizer),
    }


def _check_fits(checkpoint: Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    if saved["format"] != FORMAT:
        raise ConfigError(f"checkpoint {checkpoint} has format {saved['format']}, this program reads {FORMAT}")
    saved_shapes, shapes = _shapes(saved), _shapes(expected)
    for name in [*shapes, *saved_shapes]:
        if saved_shapes.get(name) != shapes.get(name):
            raise ConfigError(
                f"checkpoint {checkpoint} is of another model: {name} is {saved_shapes.get(name, 'missing')} there and "
                f"{shapes.get(name, 'missing')} in this run; take model.* from its config.yaml, or another run.dir"
            )
    for name in ("data_size", "tensor_size", "num_shards", "device", "optimizer", "buffers"):
        if saved[name] != expected[name]:
            numbers = "" if name == "buffers" else f" {name}={saved[name]}, this run has {expected[name]}"
            raise ConfigError(
                f"checkpoint {checkpoint} was saved in another layout:{numbers}; start as many ranks on the same kind "
                "of device, with zero.* and train.precision as in its config.yaml"
            )


def _shapes(layout: dict[str, Any]) -> dict[str, list[int]]:
    return {name: shape for buffer in layout["buffers"] for name, (shape, *_) in buffer["spans"].items()}


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def _write_durably(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old text or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    _flush(partial)
    partial.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Onto the disk; of a folder, its entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
