"""The file layout.json of a checkpoint: what was saved, where each tensor is stored, and the seals of all files.

It is the last file to be written and the first to be read. It has a checksum, and the checksums and sizes of all other
files, so that a file of another step, rank or run is refused even if it is a valid file of the same name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gpt.build import TrainState
from gpt.checkpoint.adam import are_alike
from gpt.checkpoint.folder import LAYOUT, step_in_name
from gpt.model.transformer import ModelConfig
from parallel.errors import ConfigError
from zero.state.description import DESCRIPTION, check_description
from zero.state.owned_state import describe_state, group_counters
from zero.state.saved_state import full_shapes, rank_file
from zero.state.schema import COUNT, Schema, check
from zero.state.sealed_file import Seal, read_json, verify
from zero.state.tensor_file import TensorFile

FORMAT = 4
MAY_DIFFER = {"dropout", "attention", "vocab_multiple"}  # fields of ModelConfig that a run may resume with others of
ORIGIN = "origin"  # the metadata of a rank's file that names its rank, step and run


@dataclass(frozen=True)
class Progress:
    """The progress of a run, and the random name by which its files are told from those of other runs."""

    step: int = 0
    consumed_samples: int = 0
    run: str = ""


def _schema_of(config: type) -> Schema:
    hints = get_type_hints(config)
    return {field.name: _schema_of_type(hints[field.name]) for field in fields(config)}


def _schema_of_type(hint: Any) -> Schema:
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return COUNT if hint is int else hint


SCHEMA: Schema = {
    "progress": {"step": COUNT, "consumed_samples": COUNT, "run": str},
    "model": _schema_of(ModelConfig),
    "data": dict,  # settings that determine the order of samples, by the names of their options
    "optimizer": str,
    "optimizer_counters": [{str: float}],
    "files": [(str, COUNT)],  # the seal of each rank's file
    "state": DESCRIPTION,
}


def describe(state: TrainState, progress: Progress, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of layout.json without the seals of the files; it is the same on every rank."""
    return {
        "format": FORMAT,
        "progress": asdict(progress),
        "model": asdict(state.config),
        "data": dict(data),
        "optimizer": type(state.optimizer.inner).__name__,
        "optimizer_counters": group_counters(state.optimizer),
        "state": describe_state(state.model, state.mesh.data.size, state.mesh.tensor.size),
    }


def with_seals(layout: Mapping[str, Any], seals: Sequence[Seal]) -> dict[str, Any]:
    """Return the whole content of layout.json; `seals` are in the order of the ranks."""
    return {**layout, "files": [[seal.checksum, seal.num_bytes] for seal in seals]}


def origin(progress: Progress, rank: int) -> str:
    """Return the text by which the file of a rank says what it is."""
    return f"rank {rank} of step {progress.step} of run {progress.run}"


def read_layout(checkpoint: Path) -> dict[str, Any]:
    """Return the content of layout.json.

    Raises ConfigError if the file is damaged, has another format, or describes what cannot be.
    """
    path = checkpoint / LAYOUT
    layout = read_json(path, {"format": COUNT})
    if layout["format"] != FORMAT:
        raise ConfigError(
            f"checkpoint {checkpoint} has format {layout['format']}, this program reads {FORMAT}; resume it with the "
            "version of the program that wrote it"
        )
    check(layout, SCHEMA, path)
    check_description(layout["state"], [num_bytes for _, num_bytes in layout["files"]], path)
    step = layout["progress"]["step"]
    if step_in_name(checkpoint) not in (None, step):
        raise ConfigError(f"{path} belongs to another checkpoint: it is of step {step}")
    return layout


def verify_file(checkpoint: Path, layout: Mapping[str, Any], rank: int) -> None:
    """Read the file of a saved rank. Raises ConfigError unless it is undamaged, and the one that layout.json names."""
    path = rank_file(checkpoint, rank)
    found, named = verify(path), Seal(*layout["files"][rank])
    if found == named:
        return
    of_file = TensorFile(path).metadata.get(ORIGIN, "an unknown run")
    of_layout = origin(Progress(**layout["progress"]), rank)
    raise ConfigError(
        f"{path} belongs to another checkpoint: it is of {of_file} (CRC-32 {found.checksum}, {found.num_bytes} bytes), "
        f"layout.json names that of {of_layout} (CRC-32 {named.checksum}, {named.num_bytes} bytes)"
    )


def check_fits(checkpoint: Path, saved: Mapping[str, Any], state: TrainState) -> None:
    """Raise ConfigError unless the checkpoint has the model and the optimizer of this run."""
    expected = describe(state, Progress(), {})
    saved_shapes, shapes = full_shapes(saved["state"]), full_shapes(expected["state"])
    for name in [*shapes, *saved_shapes]:
        if saved_shapes.get(name) != shapes.get(name):
            raise ConfigError(
                f"checkpoint {checkpoint} is of another model: {name} is {saved_shapes.get(name, 'missing')} there and "
                f"{shapes.get(name, 'missing')} in this run; take model.* from its config.yaml, or another run.dir"
            )
    for name, value in expected["model"].items():
        if name not in MAY_DIFFER and saved["model"][name] != value:
            raise ConfigError(
                f"model.{name}={value}, but checkpoint {checkpoint} is of a model with {saved['model'][name]}; choose "
                f"model.{name}={saved['model'][name]}, or another run.dir"
            )
    if not are_alike(saved["optimizer"], expected["optimizer"]):
        raise ConfigError(
            f"checkpoint {checkpoint} was saved with the optimizer {saved['optimizer']}, this run has "
            f"{expected['optimizer']}; resume it with the program that wrote it"
        )


def changed_data(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each setting that changes the data, and has another value than in the checkpoint."""
    return [
        f"{name}={value}, but the checkpoint was saved with {saved['data'].get(name)}: from here on, samples are others"
        for name, value in present.items()
        if saved["data"].get(name) != value
    ]
