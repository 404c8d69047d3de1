"""The file layout.json of a checkpoint: what was saved, where each tensor is stored, and the seals of all files.

It is the last file to be written and the first to be read. It has a checksum, and the checksums and sizes of all other
files, so that a file of another save or rank is refused even if it is a valid file of the same name. Buckets and shards
are computed from the description of the buffers, whose size does not depend on their number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from parallel.validation.errors import ConfigError
from zero.checkpoint.schema import COUNT, Schema, check, shown
from zero.checkpoint.sealed_file import DamageError, Seal, read_json, verify
from zero.checkpoint.tensor_file import MAX_DIMS, TensorFile
from zero.core.partition.layout import Layout, Span, cut_into_buckets

LAYOUT = "layout.json"
OTHER_WRITERS = {  # by a file that each of them writes
    ".metadata": "torch.distributed.checkpoint",
    "*_model_states.pt": "DeepSpeed",
    "*/*_model_states.pt": "DeepSpeed",
}
FORMAT = 4
ORIGIN = "origin"  # the metadata of a rank's file that names its rank and its save
NUM_RANKS = range(1, 2**24)
NUMEL = range(2**56)
DESCRIPTION: Schema = {
    "data_size": NUM_RANKS,
    "tensor_size": NUM_RANKS,
    "split_dims": {str: range(MAX_DIMS)},
    "buffers": [
        {
            "numel": NUMEL,
            "bucket_numel": NUMEL,
            "num_shards": NUM_RANKS,
            "spans": {str: ([NUMEL], NUMEL)},  # name of a parameter: its shape, and its first element in the buffer
        }
    ],
}
SCHEMA: Schema = {
    "optimizer": str,
    "optimizer_counters": [{str: float}],
    "files": [(str, COUNT)],  # the seal of each rank's file
    "state": DESCRIPTION,
}
MIN_ENTRY_BYTES = 50  # of the description of a tensor in the header of a file


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of the file that a rank writes."""
    return folder / f"rank-{rank:05d}.safetensors"


def origin(rank: int, save: str) -> str:
    """Return the text by which the file of a rank says what it is; `save` names one save, such as its step and run."""
    return f"rank {rank} of {save}"


def is_complete(checkpoint: Path) -> bool:
    """Return whether the folder has a layout.json, which is the last file of a checkpoint to be written."""
    try:
        return (checkpoint / LAYOUT).is_file()
    except OSError:  # the name is too long, for example
        return False


def writer_of(folder: Path) -> str | None:
    """Return the name of the other program that has written the checkpoint in a folder; None if there is none."""
    with suppress(OSError):  # the name is too long, for example
        return next((writer for pattern, writer in OTHER_WRITERS.items() if any(folder.glob(pattern))), None)
    return None


def no_checkpoint(folder: Path) -> str:
    """Return what to tell a user who gave a folder that is not complete."""
    if writer := writer_of(folder):
        return f"is a checkpoint of {writer}; load it by load_distributed of zero"
    return "holds no complete checkpoint; give the folder of one"


def read_layout(checkpoint: Path, schema: dict[str, Schema]) -> dict[str, Any]:
    """Return the content of layout.json; `schema` is that of the keys that the program adds to `SCHEMA`.

    Raises ConfigError if the file is damaged, has another format, or describes what cannot be.
    """
    path = checkpoint / LAYOUT
    layout = read_json(path, {"format": COUNT})
    if layout["format"] != FORMAT:
        raise ConfigError(
            f"checkpoint {checkpoint} has format {layout['format']}, this program reads {FORMAT}; resume it with the "
            "version of the program that wrote it"
        )
    check(layout, {**schema, **SCHEMA}, path)
    check_description(layout["state"], [num_bytes for _, num_bytes in layout["files"]], path)
    return layout


def verify_file(
    checkpoint: Path, layout: Mapping[str, Any], rank: int, save: str, on_chunk: Callable[[], None] = lambda: None
) -> None:
    """Read the file of a saved rank. Raises DamageError unless it is undamaged, and the one that layout.json names."""
    path = rank_file(checkpoint, rank)
    found, named = verify(path, on_chunk), Seal(*layout["files"][rank])
    if found == named:
        return
    of_file = TensorFile(path).metadata.get(ORIGIN, "an unknown run")
    raise DamageError(
        f"{path} belongs to another checkpoint: it is of {of_file} (CRC-32 {found.checksum}, {found.num_bytes} bytes), "
        f"layout.json names that of {origin(rank, save)} (CRC-32 {named.checksum}, {named.num_bytes} bytes)"
    )


def describe_layout(layout: Layout) -> dict[str, Any]:
    """Return a description of a layout: the name, shape and start of each parameter, and the bucket size.

    It has `num_parts`, of each shard, if there are several: no older checkpoint has that key.
    """
    num_parts = layout.buckets[0].num_parts
    return {
        **({"num_parts": num_parts} if num_parts > 1 else {}),
        "numel": layout.numel,
        "bucket_numel": len(layout.buckets[0].elements),
        "num_shards": layout.buckets[0].num_shards,
        "spans": {span.name: [list(span.shape), span.elements.start] for span in layout.spans},
    }


def layout_of(description: dict[str, Any]) -> Layout:
    """Return the layout of a result of `describe_layout`."""
    spans = []
    for name, (shape, start) in description["spans"].items():
        spans.append(Span(name, torch.Size(shape), range(start, start + math.prod(shape))))
    numel, bucket_numel, num_shards = (description[name] for name in ("numel", "bucket_numel", "num_shards"))
    buckets = cut_into_buckets(numel, bucket_numel, num_shards, description.get("num_parts", 1))
    return Layout(tuple(spans), buckets)


def check_description(description: dict[str, Any], file_bytes: Sequence[int], path: object) -> None:
    """Raise ConfigError unless a description in the file `path` is possible for files of these sizes.

    Nothing is computed whose size is not bounded by that of the files.
    """
    if problem := _problem(description, file_bytes):
        raise ConfigError(f"{path} is damaged: {problem}")


def _problem(description: dict[str, Any], file_bytes: Sequence[int]) -> str | None:
    """Return what is impossible in a description that fits `DESCRIPTION`, or None."""
    num_files, buffers = description["data_size"] * description["tensor_size"], description["buffers"]
    if len(file_bytes) != num_files:
        return f"it names {len(file_bytes)} files, its {num_files} ranks wrote as many"
    # Every element of a buffer has a master weight in some file, and every bucket an entry in the first file's header.
    numel = sum(buffer["numel"] for buffer in buffers)
    if numel > sum(file_bytes):
        return f"its buffers have {numel} elements, its files {sum(file_bytes)} bytes"
    for number, buffer in enumerate(buffers):
        if problem := _problem_of_buffer(buffer, description["data_size"], file_bytes[0]):
            return f"in buffer {number}, {problem}"
    shapes = {name: shape for buffer in buffers for name, (shape, _) in buffer["spans"].items()}
    if len(shapes) != sum(len(buffer["spans"]) for buffer in buffers):
        return "two buffers have a parameter of the same name"
    for name, dim in description["split_dims"].items():
        if dim >= len(shapes.get(name, [])):
            return f"{shown(name)} has no dim {dim} to be split along"
    return None


def _problem_of_buffer(buffer: dict[str, Any], data_size: int, first_file_bytes: int) -> str | None:
    numel, bucket_numel, num_shards = (buffer[name] for name in ("numel", "bucket_numel", "num_shards"))
    num_parts = buffer.get("num_parts", 1)
    if type(num_parts) is not int or num_parts < 1:
        return f"num_parts is {shown(num_parts)}, a positive integer is needed"
    num_owners = num_shards * num_parts
    if num_owners > data_size:
        return f"{num_owners} shards are more than the {data_size} data-parallel ranks"
    if not 0 < bucket_numel <= numel or bucket_numel % num_owners or numel % num_owners:
        return f"{numel} elements in buckets of {bucket_numel} cannot be cut into {num_owners} equal shards"
    if numel // bucket_numel * MIN_ENTRY_BYTES > first_file_bytes:
        return f"{numel // bucket_numel} buckets do not fit into a file of {first_file_bytes} bytes"
    if any(len(shape) > MAX_DIMS for shape, _ in buffer["spans"].values()):
        return f"a parameter has more than {MAX_DIMS} dims"
    stops = [(name, start, start + math.prod(shape)) for name, (shape, start) in buffer["spans"].items()]
    for (_, _, stop), (name, start, _) in pairwise([("", 0, 0), *stops, ("the end", numel, numel)]):
        if start < stop:
            return f"{shown(name)} begins at {start}, before the parameter before it ends at {stop}"
    return None
