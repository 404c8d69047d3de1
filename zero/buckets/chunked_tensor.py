"""A tensor of which a rank has some rectangles, by the protocol through which DCP saves and loads DTensor.

DTensor itself cannot express a shard that begins inside a row. The protocol is a private part of torch;
tests/unit/zero/dcp/test_folders.py and tests/distributed/zero/test_distributed_state.py fail if it changes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Chunk(NamedTuple):
    """A rectangle of a tensor, and its values."""

    offsets: torch.Size
    values: Tensor


class ChunkedTensor(Tensor):
    """A tensor of which this process has some rectangles, perhaps none, as views of other memory.

    `torch.distributed.checkpoint` saves the rectangles, and loads into them in place. No operation can read the tensor.
    """

    chunks: Sequence[Chunk]

    @staticmethod
    def __new__(cls, shape: torch.Size, chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device) -> Any:
        """Return a tensor of this whole shape."""
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.chunks = chunks
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Let copies be made of the rectangles, for asynchronous saves; refuse every other operation."""
        aten, self = torch.ops.aten, args[0]
        if func is aten.new_empty.default:  # its rectangles are copied as attributes of the tensor
            return cls(self.shape, [], self.dtype, (kwargs or {}).get("device", self.device))
        if func not in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            raise TypeError(f"{func} was called with a tensor of which this rank has a part; gather it first")
        chunks = [Chunk(offsets, func(values, **kwargs or {})) for offsets, values in self.chunks]
        like = chunks[0].values if chunks else func(torch.empty(0, dtype=self.dtype), **kwargs or {})
        return cls(self.shape, chunks, like.dtype, like.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ChunkedTensor({list(self.shape)}, {self.dtype}, {len(self.chunks)} chunks)"

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(stored, TensorProperties.create_from_tensor(chunk.values), self.shape),
            )
            for number, (chunk, stored) in enumerate(zip(self.chunks, self.__create_chunk_list__(), strict=True))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(chunk.offsets, chunk.values.shape) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        (values,) = (chunk.values for chunk in self.chunks if chunk.offsets == index.offset)
        return values
