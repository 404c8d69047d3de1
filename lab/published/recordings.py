"""Recordings of dry runs, kept in runs/published: what a projection needs of one, as JSON.

The name of a file has the settings and the log of kernels. Delete runs/published after any other change to the training
step.
"""

import gzip
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from lab.dryrun.dry_run import DEVICE, HOST, Recording, dry_run
from lab.observe.kernel_log import Kernel
from lab.planner.depth import DEPTHS
from lab.published.rows import ROOT, Row, settings_of, settings_tree
from parallel.comm_log import CommEvent

CACHE = ROOT / "runs/published"
SOURCES = ("lab/observe/kernel_log.py",)  # what a change of these records, older recordings lack


@dataclass(frozen=True)
class StoredRecording:
    """The kernels and collectives of a step of a shallow model, and the memory of one rank."""

    num_layers: int
    num_micro_batches: int
    device_bytes: int
    host_bytes: int
    kernels: list[Kernel]
    events: list[CommEvent]


def recordings_of(row: Row) -> tuple[StoredRecording, ...]:
    """Return the recordings at both depths, from the cache if it has them."""
    return tuple(_recording(row, depth) for depth in DEPTHS)


def is_stored(row: Row) -> bool:
    return all(_path(settings_tree(row, depth), _world_size(row)).exists() for depth in DEPTHS)


def _recording(row: Row, num_layers: int) -> StoredRecording:
    tree, world_size = settings_tree(row, num_layers), _world_size(row)
    path = _path(tree, world_size)
    if not path.exists():
        settings = settings_of(tree, world_size)
        stored = _as_json(dry_run(settings), num_layers, settings.train.num_micro_batches(row.data_size))
        keep(path, gzip.compress(json.dumps(stored).encode(), 1))
    return _parsed(json.loads(gzip.decompress(path.read_bytes())))


def keep(path: Path, content: bytes) -> None:
    """Write a file of the cache; a run that ends meanwhile leaves no file that looks complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_bytes(content)
    scratch.replace(path)


def _world_size(row: Row) -> int:
    return row.tp * row.data_size


def _path(tree: dict[str, Any], world_size: int) -> Path:
    text = yaml.safe_dump(tree) + str(world_size) + "".join((ROOT / source).read_text() for source in SOURCES)
    return CACHE / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json.gz"


def _as_json(recording: Recording, num_layers: int, num_micro_batches: int) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "num_micro_batches": num_micro_batches,
        "device_bytes": sum(recording.peak[DEVICE].values()),
        "host_bytes": sum(recording.peak[HOST].values()),
        "kernels": [asdict(kernel) | {"dtype": str(kernel.dtype)} for kernel in recording.kernels],
        "events": [
            [e.op, e.axis, e.group_size, e.message_bytes, str(e.dtype), e.phase, e.launched, e.awaited]
            for e in recording.events
        ],
    }


def _dtype(name: str) -> torch.dtype:
    """Return the type of a name such as torch.bfloat16."""
    return getattr(torch, name.removeprefix("torch."))


def _parsed(stored: dict[str, Any]) -> StoredRecording:
    kernels = []
    for values in stored["kernels"]:
        for name in ("product", "attention"):
            values[name] = tuple(values[name]) if values[name] else None
        kernels.append(Kernel(**(values | {"dtype": _dtype(values["dtype"])})))
    events = [
        CommEvent(op, axis, size, message_bytes, _dtype(dtype), phase, launched, awaited)
        for op, axis, size, message_bytes, dtype, phase, launched, awaited in stored["events"]
    ]
    return StoredRecording(**(stored | {"kernels": kernels, "events": events}))
