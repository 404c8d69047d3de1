"""The file layout.json of a checkpoint: what was saved, where each tensor is stored, and the seals of all files.

It is the last file to be written and the first to be read. It has a checksum, and the checksums and sizes of all other
files, so that a file of another save or rank is refused even if it is a valid file of the same name.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel.errors import ConfigError
from zero.state.description import DESCRIPTION, check_description
from zero.state.saved_state import rank_file
from zero.state.schema import COUNT, Schema, check
from zero.state.sealed_file import Seal, read_json, verify
from zero.state.tensor_file import TensorFile

LAYOUT = "layout.json"
OTHER_WRITERS = {  # by a file that each of them writes
    ".metadata": "torch.distributed.checkpoint",
    "*_model_states.pt": "DeepSpeed",
    "*/*_model_states.pt": "DeepSpeed",
}
FORMAT = 4
ORIGIN = "origin"  # the metadata of a rank's file that names its rank and its save
SCHEMA: Schema = {
    "optimizer": str,
    "optimizer_counters": [{str: float}],
    "files": [(str, COUNT)],  # the seal of each rank's file
    "state": DESCRIPTION,
}


def with_seals(layout: Mapping[str, Any], seals: Sequence[Seal]) -> dict[str, Any]:
    """Return the whole content of layout.json; `seals` are in the order of the ranks."""
    return {**layout, "files": [[seal.checksum, seal.num_bytes] for seal in seals]}


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


def verify_file(checkpoint: Path, layout: Mapping[str, Any], rank: int, save: str) -> None:
    """Read the file of a saved rank. Raises ConfigError unless it is undamaged, and the one that layout.json names."""
    path = rank_file(checkpoint, rank)
    found, named = verify(path), Seal(*layout["files"][rank])
    if found == named:
        return
    of_file = TensorFile(path).metadata.get(ORIGIN, "an unknown run")
    raise ConfigError(
        f"{path} belongs to another checkpoint: it is of {of_file} (CRC-32 {found.checksum}, {found.num_bytes} bytes), "
        f"layout.json names that of {origin(rank, save)} (CRC-32 {named.checksum}, {named.num_bytes} bytes)"
    )
