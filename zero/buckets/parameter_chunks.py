"""The rectangles of parameters, and of states of their shape, that a rank owns: the tensors of torch's state dicts."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from parallel.errors import ConfigError
from parallel.mesh import Axis
from zero.buckets.chunked_tensor import Chunk, ChunkedTensor
from zero.buckets.flat import FlatParameters
from zero.partition.layout import rectangles, shifted


class ParameterChunks:
    """The parameters of a model as torch's state dicts have them: in whole shapes, cut into what each rank owns."""

    def __init__(self, module: nn.Module, split: Mapping[str, int], owners: Axis, tensor: Axis, device: torch.device):
        """`split`: the dims along which the ranks of `tensor` divide parameters; `owners` divide what each of them has.

        Raises ConfigError if a parameter is complex.
        """
        self.names = {param: name for name, param in module.named_parameters()}  # of tied ones the first
        if any(param.is_complex() for param in self.names):
            raise ConfigError("complex parameters cannot be in a state dict of shards; use `save` and `load` of zero")
        self._shapes = {name: param.shape for param, name in self.names.items()}
        self._split, self._owners, self._tensor, self._device = split, owners, tensor, device

    def weights(self, flats: Sequence[FlatParameters]) -> dict[str, ChunkedTensor]:
        """Return this rank's shards of the master weights, by the name of the parameter."""
        parts: dict[str, list[tuple[range, Tensor]]] = {name: [] for name in self._shapes}
        dtypes = {span.name: flat.buckets[0].master.dtype for flat in flats for span in flat.layout.spans}
        for flat in flats:
            for bucket in flat.buckets:
                for span, own in flat.layout.spans_in(bucket.shard):
                    elements = shifted(own, span.elements.start)
                    parts[span.name].append((elements, bucket.owned_part(bucket.master, own)))
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
