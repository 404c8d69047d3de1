"""A reader of DCP's folders that executes nothing of what it reads: they may come from anywhere."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from parallel.validation.errors import ConfigError, first_line

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


def load_plain(file: Any, **options: Any) -> Any:
    """Return the tensors and plain values of a file. Raises ValueError if it has others: they could execute code."""
    try:
        return torch.load(file, weights_only=True, **options)
    except pickle.UnpicklingError as error:  # whose message says how to execute it
        reason = "a piece of it is damaged, or names what is no tensor and no plain value and could execute code"
        raise ValueError(reason) from error


class FolderReader(FileSystemReader):
    """A reader of a folder in which a piece, a tensor or the bytes of a value, is read once for all its parts."""

    def stored(self, item: ReadItem) -> io.BytesIO | Tensor:
        """Return the piece that an item is a part of."""
        raise NotImplementedError

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan needs."""
        last, stored = None, None
        for item in sorted(plan.items, key=lambda item: (item.storage_index.fqn, item.storage_index.offset or ())):
            if item.storage_index != last:
                stored = None  # freed before the next one is read
                last, stored = item.storage_index, self.stored(item)
            if isinstance(stored, io.BytesIO):
                planner.load_bytes(item, stored)
                continue
            assert stored is not None
            values = stored
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                values = values.narrow(dim, offset, length)
            out = planner.resolve_tensor(item).detach()
            out.copy_(values)
            planner.commit_tensor(item, out)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class SafeReader(FolderReader):
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
            has_names = all(isinstance(key, str) for key in dict(metadata.state_dict_metadata))
            if not isinstance(metadata, Metadata) or named != {True} or not has_names:
                raise ValueError("it does not describe the files of its folder")
        except Exception as error:  # damaged bytes raise almost anything
            raise ConfigError(
                f"{path} is not that of a DCP checkpoint ({first_line(error)}); choose another folder"
            ) from error
        metadata.storage_meta = None
        return metadata

    def stored(self, item: ReadItem) -> io.BytesIO | Tensor:
        """Return the piece that an item is a part of, from its file."""
        info = self.storage_data[item.storage_index]
        with (Path(self.path) / info.relative_path).open("rb") as file:
            part = self._slice_file(file, info)
            stream: Any = self.transforms.transform_load_stream(item, info.transform_descriptors or (), part)
            if item.type is LoadItemType.BYTE_IO or not stream.seekable():
                stream = io.BytesIO(stream.read(-1))
            is_tensor = item.type is LoadItemType.TENSOR
            return load_plain(stream, map_location="cpu") if is_tensor else stream


class SafePlanner(DefaultLoadPlanner):
    """A planner of loads into a flat dictionary; values that are no tensors are loaded if they are plain."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Load numbers, strings, and lists and dictionaries of them."""
        self.state_dict[read_item.dest_index.fqn] = load_plain(value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in KNOWN_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
