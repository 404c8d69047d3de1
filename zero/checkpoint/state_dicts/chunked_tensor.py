"""Tensors of which a rank has some rectangles, by the protocol through which DCP saves and loads DTensor.

They are the parameters, and the states of their shape, in torch's state dicts.

DTensor itself cannot express a shard that begins inside a row. The protocol is a private part of torch;
tests/unit/zero/dcp/test_folders.py and tests/distributed/zero/test_distributed_state.py fail if it changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.core.buckets.bucket import Bucket
from zero.core.buckets.flat import FlatParameters
from zero.core.partition.layout import Slice, rectangles


class Chunk(NamedTuple):
    """A rectangle of a tensor, and its values."""

    offsets: torch.Size
    values: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """Return a view of the same rectangle of a whole tensor."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.values.shape, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole


class ChunkedTensor(Tensor):
    """A tensor of which this process has some rectangles, perhaps none, as views of other memory.

    `torch.distributed.checkpoint` saves the rectangles, and loads into them in place. No operation can read the tensor.
    The ranks along `axes` have all rectangles together, some perhaps twice.
    """

    chunks: Sequence[Chunk]
    axes: Sequence[Axis]

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        chunks: Sequence[Chunk],
        dtype: torch.dtype,
        device: torch.device,
        axes: Sequence[Axis] = (),
    ) -> Any:
        """Return a tensor of this whole shape."""
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.chunks, self.axes = chunks, axes
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Let copies be made of the rectangles, for asynchronous saves; refuse every other operation."""
        aten, self = torch.ops.aten, args[0]
        if func is aten.new_empty.default:  # its rectangles are copied as attributes of the tensor
            return cls(self.shape, [], self.dtype, (kwargs or {}).get("device", self.device))
        if func not in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            raise RuntimeError(  # of a TypeError Python would make one that says nothing
                f"{func} was called with a tensor of which this rank has a part; call `full_tensor()` first"
            )
        chunks = [Chunk(offsets, func(values, **kwargs or {})) for offsets, values in self.chunks]
        like = chunks[0].values if chunks else func(torch.empty(0, dtype=self.dtype), **kwargs or {})
        return cls(self.shape, chunks, like.dtype, like.device, self.axes)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ChunkedTensor({list(self.shape)}, {self.dtype}, {len(self.chunks)} chunks)"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "torch.save was called with a tensor of which this rank has a part; use torch.distributed.checkpoint, or "
            "call `full_tensor()` on all ranks first"
        )

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """Return the whole tensor on every rank; all ranks call it. Its bits are those of the rectangles."""
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for chunk in self.chunks:
            chunk.of(whole).copy_(chunk.values)
        values = whole.view(-1).view(torch.uint8)  # zeros where this rank has nothing; a sum would change -0.0
        for axis in self.axes:
            sent = values.to(axis.communication_device(values))
            axis.all_reduce(sent, out=sent, op=dist.ReduceOp.MAX).wait()
            values.copy_(sent)
        return whole

    def parts_of(self, name: str, values: Tensor | float) -> list[Tensor]:
        """Return this rank's rectangles of a whole tensor, or of one with the same rectangles; `name` is for errors.

        Raises ConfigError if it has another shape, or other rectangles.
        """
        whole = values if isinstance(values, Tensor) else torch.tensor(values)
        if whole.shape != self.shape:
            raise ConfigError(
                f"{name} is {list(whole.shape)} in the state dict and {list(self.shape)} here; load the state of this "
                "model and optimizer"
            )
        if isinstance(whole, ChunkedTensor):
            if whole.__create_chunk_list__() != self.__create_chunk_list__():
                raise ConfigError(
                    f"{name} is cut for another layout in the state dict; load it by torch.distributed.checkpoint"
                )
            return [part for _, part in whole.chunks]
        return [chunk.of(whole) for chunk in self.chunks]

    @torch.no_grad()
    def load(self, parts: list[Tensor]) -> None:
        """Copy what `parts_of` has returned."""
        for chunk, part in zip(self.chunks, parts, strict=True):
            chunk.values.copy_(part)

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

    # With `full_state_dict=True`, `get_state_dict` gathers what is a DTensor, and returns any other tensor as it is: in
    # silence, a shard. The calls that it makes of a DTensor follow.

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return DTensor

    @property
    def device_mesh(self) -> "_Ranks":
        """The ranks that have a part, as far as torch asks for them."""
        return _Ranks(self.device.type)

    @property
    def placements(self) -> tuple[()]:
        """Nothing: no placement of torch describes the rectangles."""
        return ()

    def redistribute(self, **_: Any) -> "ChunkedTensor":
        """Return the tensor, which `to_local` gathers."""
        return self

    def to_local(self) -> Tensor:
        """Return the whole tensor."""
        return self.full_tensor()


class _Ranks:
    def __init__(self, device_type: str):
        self.device_type = device_type

    def get_coordinate(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError(
            "full_state_dict=True of set_optimizer_state_dict cannot divide values into ZeRO's shards; call "
            "load_state_dict of the ZeroOptimizer with the full state on all ranks"
        )


class ParameterChunks:
    """The parameters of a model as torch's state dicts have them: in whole shapes, cut into what each rank owns."""

    def __init__(self, module: nn.Module, split: Mapping[str, int], owners: Axis, tensor: Axis, device: torch.device):
        """`split`: dims along which the ranks of `tensor` divide parameters; `owners` divide what each of them has."""
        self.names = {param: name for name, param in module.named_parameters()}  # of tied ones the first
        self._shapes = {name: param.shape for param, name in self.names.items()}
        self._split, self._owners, self._tensor, self._device = split, owners, tensor, device

    def weights(
        self, flats: Sequence[FlatParameters], owned: Iterable[tuple[Bucket, Slice, Tensor]]
    ) -> dict[str, ChunkedTensor]:
        """Return this rank's shards of the master weights, by the name of the parameter; `owned`: all slices."""
        parts: dict[str, list[tuple[range, Tensor]]] = {name: [] for name in self._shapes}
        dtypes = {span.name: flat.buckets[0].master.dtype for flat in flats for span in flat.layout.spans}
        for _, own, values in owned:
            parts[own.span.name].append((own.in_param, values))
        return {name: self.cut(name, parts[name], dtypes[name]) for name in parts}

    def cut(self, name: str, parts: Iterable[tuple[range, Tensor]], dtype: torch.dtype) -> ChunkedTensor:
        """Return a parameter, or one of its states, of which this rank has `parts`: elements of its own tensor part."""
        shape, dim = list(self._shapes[name]), self._split.get(name)
        chunks = []
        for elements, values in parts:
            start = 0
            for offsets, sizes in rectangles(shape, elements):
                size = torch.Size(sizes).numel()
                at = [offset + (i == dim) * self._tensor.rank * shape[i] for i, offset in enumerate(offsets)]
                chunks.append(Chunk(torch.Size(at), values[start : start + size].view(sizes)))
                start += size
        if dim is not None:
            shape[dim] *= self._tensor.size
        return ChunkedTensor(torch.Size(shape), chunks, dtype, self._device, self._axes(name))

    def counter(self, name: str, values: Iterable[Tensor], like: Tensor) -> ChunkedTensor:
        """Return a number that belongs to a parameter; ranks that have no part of the parameter do not know it."""
        chunks = [Chunk(torch.Size(), value) for value in values][:1]
        return ChunkedTensor(like.shape, chunks, like.dtype, like.device, self._axes(name))

    def _axes(self, name: str) -> list[Axis]:
        return [self._owners, self._tensor] if name in self._split else [self._owners]
