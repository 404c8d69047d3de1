"""Settings of the training data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from parallel.validation.errors import ConfigError
from parallel.validation.fields import FilePath, NonNegative, Range, checked

Share = Annotated[float, Range(0, 1e9)]


def check_names(option: str, names: Sequence[str]) -> None:
    """Raise ConfigError if two of the names of what an option lists are equal."""
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{option} has {len(names)} entries of {len(set(names))} names, {', '.join(names)}, by which they are "
            "logged; rename the files"
        )


@checked
class ScheduledWeights:
    """Weights of the corpora of data.path from a step on."""

    step: NonNegative
    """Number of steps after which the weights hold; 0: from the beginning."""
    weights: tuple[Share, ...]
    """A weight for each corpus of data.path, in its order; 0: no samples of this one."""


@checked
class DataSettings:
    """The training data: token files written by `python -m data.prepare`."""

    path: FilePath | list[FilePath]
    """PREFIX of a pair of files PREFIX.bin and PREFIX.idx, or a list of WEIGHT:PREFIX to blend several."""
    split: tuple[Share, Share, Share] = (0.98, 0.01, 0.01)
    """Shares of the documents that are used for training, validation and test."""
    schedule: tuple[ScheduledWeights, ...] = ()
    """Changes of the weights of data.path, such as [{step: 9000, weights: [0.2, 0.8]}], with rising steps; each corpus
    goes on where it stands. Empty: the weights of data.path hold for the whole run."""
    validation: tuple[FilePath, ...] = ()
    """PREFIXes of corpora for validation, each of which has a loss of its own, by the last part of its PREFIX. Empty:
    the validation share of data.path."""
    cache_dir: FilePath | None = None
    """Folder for cached indices of samples; null: the folder of the data."""
    mask_documents: bool = False
    """Keep the documents of a sample apart: attention does not cross the end of a document, positions restart, and the
    first token of the next one is not predicted."""
    packing: Literal["stream", "best_fit"] = "stream"
    """stream: samples are stretches of the joined documents; best_fit: documents are packed whole into samples, with
    padding, and only those that are longer than a sample are cut. best_fit needs data.mask_documents=true."""

    def __post_init__(self) -> None:
        steps = [change.step for change in self.schedule]
        num_corpora = 1 if isinstance(self.path, str) else len(self.path)
        if steps != sorted(set(steps)):
            raise ConfigError(f"DataSettings.schedule has the steps {steps}, which do not rise; order them")
        for change in self.schedule:
            if len(change.weights) != num_corpora or not sum(change.weights):
                raise ConfigError(
                    f"DataSettings.schedule has the weights {list(change.weights)} at step {change.step}, and "
                    f"DataSettings.path {num_corpora} corpora; give each of them a weight, one of them above 0"
                )
        check_names("DataSettings.validation", [Path(prefix).name for prefix in self.validation])
        if self.packing == "best_fit" and not self.mask_documents:
            raise ConfigError(
                "DataSettings.packing=best_fit needs DataSettings.mask_documents=true, because a packed document does "
                "not continue the one before it; set it, or choose DataSettings.packing=stream"
            )
