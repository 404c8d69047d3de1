"""The part of layout.json that is particular to a run: its progress, its model and the settings of its data.

`zero/state/layout_file.py` has the rest.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gpt.build.train_state import TrainState
from gpt.checkpoint.folder import step_in_name
from gpt.shape.config import ModelConfig
from parallel.errors import ConfigError
from zero.state import layout_file
from zero.state.layout_file import LAYOUT
from zero.state.rank_state import RankState
from zero.state.schema import COUNT, Schema

MAY_DIFFER = {"dropout", "attention", "vocab_multiple"}  # fields of ModelConfig that a run may resume with others of


@dataclass(frozen=True)
class Progress:
    """The progress of a run, and the random name by which its files are told from those of other runs."""

    step: int = 0
    consumed_samples: int = 0
    run: str = ""


def _schema_of(config: type) -> Schema:
    """Return the schema of the fields that every checkpoint has: one of an earlier version may lack others."""
    hints, named = get_type_hints(config), [field for field in fields(config) if field.default is MISSING]
    return {name: _schema_of_type(hints[name]) for name in [*(field.name for field in named), *sorted(MAY_DIFFER)]}


def _schema_of_type(hint: Any) -> Schema:
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return COUNT if hint is int else hint


SCHEMA: dict[str, Schema] = {
    "progress": {"step": COUNT, "consumed_samples": COUNT, "run": str},
    "model": _schema_of(ModelConfig),
    "data": dict,  # settings that determine the order of samples, by the names of their options
}


def content_of(state: TrainState, progress: Progress, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run adds to layout.json; it is the same on every rank."""
    return {"progress": asdict(progress), "model": asdict(state.config), "data": dict(data)}


def name_of(progress: Progress) -> str:
    """Return the text that names a save in the origins of its files."""
    return f"step {progress.step} of run {progress.run}"


def read_layout(checkpoint: Path) -> dict[str, Any]:
    """Return the content of layout.json.

    Raises ConfigError if the file is damaged, has another format, or describes what cannot be.
    """
    layout = layout_file.read_layout(checkpoint, SCHEMA)
    step = layout["progress"]["step"]
    if step_in_name(checkpoint) not in (None, step):
        raise ConfigError(f"{checkpoint / LAYOUT} belongs to another checkpoint: it is of step {step}")
    try:
        layout["model"] = asdict(ModelConfig.from_plain(layout["model"]))
    except ConfigError as error:
        raise ConfigError(f"{checkpoint / LAYOUT} is damaged: {error}") from error
    return layout


def check_fits(checkpoint: Path, saved: Mapping[str, Any], config: ModelConfig, state: RankState) -> None:
    """Raise ConfigError unless the checkpoint has the model and the optimizer of this run."""
    state.check_fits(checkpoint, saved, "take model.* from its config.yaml, or another run.dir")
    for name, value in asdict(config).items():
        if name not in MAY_DIFFER and saved["model"][name] != value:
            raise ConfigError(
                f"model.{name}={value}, but checkpoint {checkpoint} is of a model with {saved['model'][name]}; choose "
                f"model.{name}={saved['model'][name]}, or another run.dir"
            )


def changed_data(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each setting that changes the data, and has another value than in the checkpoint."""
    return [
        f"{name}={value}, but the checkpoint was saved with {saved['data'].get(name)}: from here on, samples are others"
        for name, value in present.items()
        if saved["data"].get(name, value) != value  # older checkpoints do not have all
    ]
