"""The part of layout.json that is particular to a run: its progress, its model and the settings of its data.

`zero/checkpoint/layout_file.py` has the rest.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt.checkpoint.folder import step_in_name
from gpt.shape.config import ModelConfig
from parallel.validation.errors import ConfigError
from zero.checkpoint.layout_file import LAYOUT, read_layout
from zero.checkpoint.schema import COUNT, Schema, check

logger = logging.getLogger(__name__)
MASKS = {"train.compile", "activations.store"}  # settings that change what dropout drops, and not the samples
INITIAL_WEIGHTS = "train.initial_weights"
TOKENIZER = "tokenizer"  # beside the settings of the data: `vocabulary_hash` of the tokenizer
MAY_DIFFER = {"dropout", "attention", "vocab_multiple"}  # fields of ModelConfig that a run may resume with others of


@dataclass(frozen=True)
class Progress:
    """The progress of a run, in all and in each corpus, and the random name that tells its files from other runs'."""

    step: int = 0
    consumed_samples: int = 0
    run: str = ""
    mixture: dict[str, Any] | None = None  # as in MIXTURE; None in checkpoints of earlier versions

    @property
    def save_name(self) -> str:
        """The text that names a save in the origins of its files."""
        return f"step {self.step} of run {self.run}"


@dataclass(frozen=True)
class SavedRun:
    """The content of a checkpoint's layout.json: all of it in `layout`, and the run's part in its own types."""

    layout: Mapping[str, Any]
    progress: Progress
    model: ModelConfig


SCHEMA: dict[str, Schema] = {
    "progress": {"step": COUNT, "consumed_samples": COUNT, "run": str},
    "model": dict,  # fields of ModelConfig; a checkpoint of an earlier version may lack some
    # Settings that determine the order of samples, by the names of their options, and the folder of initial weights,
    # whose tokenizer and positions exports have.
    "data": dict,
}


# The present stretch of the blend of corpora: where it begins, and the samples of each corpus taken before it.
MIXTURE: Schema = {
    "first_sample": COUNT,
    "corpora": [{"prefix": str, "fingerprint": str, "weight": float, "taken": COUNT}],
}


def content_of(config: ModelConfig, progress: Progress, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run adds to layout.json; it is the same on every rank."""
    return {"progress": asdict(progress), "model": asdict(config), "data": dict(data)}


def read_run(checkpoint: Path) -> SavedRun:
    """Return the content of layout.json.

    Raises ConfigError if the file is damaged, has another format, or describes what cannot be.
    """
    path, layout = checkpoint / LAYOUT, read_layout(checkpoint, SCHEMA)
    progress = Progress(
        **{name: layout["progress"].get(name) for name in ("step", "consumed_samples", "run", "mixture")}
    )
    if (mixture := progress.mixture) is not None:
        check(mixture, MIXTURE, path, "progress.mixture")
        weights = [corpus["weight"] for corpus in mixture["corpora"]]
        if mixture["first_sample"] > progress.consumed_samples or min(weights, default=-1) < 0 or not any(weights):
            raise ConfigError(f"{path} is damaged: its mixture of corpora cannot be")
    if step_in_name(checkpoint) not in (None, progress.step):
        raise ConfigError(f"{path} belongs to another checkpoint: it is of step {progress.step}")
    try:
        return SavedRun(layout, progress, ModelConfig.from_plain(layout["model"]))
    except (ConfigError, TypeError) as error:  # a TypeError if a field is missing
        raise ConfigError(f"{path} is damaged: {error}") from error


def check_model(checkpoint: Path, saved: ModelConfig, present: ModelConfig) -> None:
    """Raise ConfigError if the checkpoint's model has the shapes of this run's, but other options."""
    all_saved = asdict(saved)
    for name, value in asdict(present).items():
        found = all_saved[name]
        if name not in MAY_DIFFER and found != value:
            raise ConfigError(
                f"model.{name}={value}, but checkpoint {checkpoint} is of a model with {found}; choose "
                f"model.{name}={found}, or another run.dir"
            )


def check_tokenizer(checkpoint: Path, saved: Mapping[str, Any], present: str | None, remedy: str) -> None:
    """Raise ConfigError if a checkpoint was trained with another tokenizer; warn if one of the two is not known."""
    found = saved.get(TOKENIZER)
    if found is None or present is None:
        unknown = f"checkpoint {checkpoint}" if found is None else "this run"
        logger.warning("%s does not say its tokenizer: that both have the same is not checked", unknown)
    elif found != present:
        raise ConfigError(
            f"checkpoint {checkpoint} was trained with another tokenizer: ids meant other tokens; {remedy}"
        )


def changed_data(saved: Mapping[str, Any], present: Mapping[str, Any], has_mixture: bool = False) -> list[str]:
    """Return a sentence for each setting that changes the data, and has another value than in the checkpoint.

    If the checkpoint `has_mixture`, its corpora are compared by what they contain, and not by their names here.
    """
    ignored = {INITIAL_WEIGHTS, TOKENIZER} | ({"data.path"} if has_mixture else set())
    changed = "samples are others", "dropout may drop other elements"
    return [
        f"{name}={value}, but the checkpoint was saved with {saved.get(name)}: from here on, {changed[name in MASKS]}"
        for name, value in present.items()
        # Older checkpoints do not have all, and initial weights are not read again.
        if saved.get(name, value) != value and name not in ignored
    ]
