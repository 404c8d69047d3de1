"""Settings of the training data."""

from dataclasses import dataclass
from typing import Annotated, Literal

from parallel.errors import ConfigError
from parallel.fields import FilePath, Range, check_fields

Share = Annotated[float, Range(0, 1e9)]


@dataclass(frozen=True)
class DataSettings:
    """The training data: token files written by `python -m data.prepare`."""

    path: FilePath | list[FilePath]
    """PREFIX of a pair of files PREFIX.bin and PREFIX.idx, or a list of WEIGHT:PREFIX to blend several."""
    split: tuple[Share, Share, Share] = (0.98, 0.01, 0.01)
    """Shares of the documents that are used for training, validation and test."""
    cache_dir: FilePath | None = None
    """Folder for cached indices of samples; null: the folder of the data."""
    mask_documents: bool = False
    """Keep the documents of a sample apart: attention does not cross the end of a document, positions restart, and the
    first token of the next one is not predicted."""
    packing: Literal["stream", "best_fit"] = "stream"
    """stream: samples are stretches of the joined documents; best_fit: documents are packed whole into samples, with
    padding, and only those that are longer than a sample are cut. best_fit needs data.mask_documents=true."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.packing == "best_fit" and not self.mask_documents:
            raise ConfigError(
                "DataSettings.packing=best_fit needs DataSettings.mask_documents=true, because a packed document does "
                "not continue the one before it; set it, or choose DataSettings.packing=stream"
            )
