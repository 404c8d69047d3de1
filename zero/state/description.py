"""The description of a saved layout for JSON, and the checks that a description from a file has to pass.

Buckets and shards are computed from it, so its size does not depend on their number.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from parallel.errors import ConfigError
from zero.partition.layout import Layout, Span, cut_into_buckets
from zero.state.schema import Schema, shown
from zero.state.tensor_file import MAX_DIMS

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
MIN_ENTRY_BYTES = 50  # of the description of a tensor in the header of a file


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


def check_description(description: dict[str, Any], file_bytes: Sequence[int], origin: object) -> None:
    """Raise ConfigError unless a description that fits `DESCRIPTION` is possible for files of these sizes.

    `origin` is the path of the description's file. Nothing is computed whose size is not bounded by that of the files.
    """
    num_files = description["data_size"] * description["tensor_size"]
    if len(file_bytes) != num_files:
        raise ConfigError(f"{origin} is damaged: it names {len(file_bytes)} files, its {num_files} ranks wrote as many")
    buffers = description["buffers"]
    # Every element of a buffer has a master weight in some file, and every bucket an entry in the first file's header.
    numel = sum(buffer["numel"] for buffer in buffers)
    if numel > sum(file_bytes):
        raise ConfigError(f"{origin} is damaged: its buffers have {numel} elements, its files {sum(file_bytes)} bytes")
    for number, buffer in enumerate(buffers):
        if problem := _problem(buffer, description["data_size"], file_bytes[0]):
            raise ConfigError(f"{origin} is damaged: in buffer {number}, {problem}")
    shapes = {name: shape for buffer in buffers for name, (shape, _) in buffer["spans"].items()}
    if len(shapes) != sum(len(buffer["spans"]) for buffer in buffers):
        raise ConfigError(f"{origin} is damaged: two buffers have a parameter of the same name")
    for name, dim in description["split_dims"].items():
        if dim >= len(shapes.get(name, [])):
            raise ConfigError(f"{origin} is damaged: {shown(name)} has no dim {dim} to be split along")


def _problem(buffer: dict[str, Any], data_size: int, first_file_bytes: int) -> str | None:
    """Return what is impossible in the description of a buffer, or None."""
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
