"""A reader of DCP's folders that executes nothing of what it reads: they may come from anywhere."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from parallel.errors import ConfigError, first_line

METADATA = ".metadata"
KNOWN_CLASSES = {
    Metadata.__module__: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    FileSystemReader.__module__: {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


class SafeReader(FileSystemReader):
    """A reader of a folder of `torch.distributed.checkpoint` that executes nothing of what it reads.

    Its methods raise ConfigError if the metadata are damaged, or name a class or a file that no such folder has.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the folder."""
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            named = {Path(info.relative_path).name == info.relative_path for info in metadata.storage_data.values()}
            tensors = dict(metadata.state_dict_metadata)
            if (
                not isinstance(metadata, Metadata)
                or named != {True}
                or not all(isinstance(key, str) for key in tensors)
            ):
                raise ValueError("it does not describe the files of its folder")
        except Exception as error:  # damaged bytes raise almost anything
            raise ConfigError(
                f"{path} is not that of a DCP checkpoint ({first_line(error)}); choose another folder"
            ) from error
        metadata.storage_meta = None
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """A planner of loads into a flat dictionary; values that are no tensors are loaded if they are plain."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Load numbers, strings, and lists and dictionaries of them."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in KNOWN_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
