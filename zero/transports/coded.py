"""Parameters that are gathered as codes of 8 bits, with any other transport for everything else.

    rest, in its place in full -> codes, in their place in room -> gathered by the other transport -> decoded to full

What a rank keeps has all its digits in `full` too, so that what is written there in place is compared with master
weights that round to it. Readers of all digits, as in `gathered()`, have the others' gathered without codes.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, Self

import torch
from torch import Tensor

from parallel.mesh import Axis, Work
from zero.core.partition.layout import Ranges, Slice, cut, overlap
from zero.core.protocols.transport import Transport


class Codec(Protocol):
    """Codes of parameters, a byte an element, which depend on the values of all ranks."""

    name: str
    """In errors: "FP8"."""

    def measure(self, owned: Iterable[tuple[Slice, Tensor]], owners: Axis) -> None:
        """Read the values of parts of parameters; all ranks of `owners` call it, each with what it owns."""

    def encode(self, where: Slice, values: Tensor, out: Tensor) -> None:
        """Write the codes, uint8, of values of a part of a parameter."""

    def decode(self, where: Slice, codes: Tensor, out: Tensor) -> None:
        """Write the values that codes of a part of a parameter stand for."""


class Coded(Transport):
    """A transport around another one, by which it sends codes of parameters; gradients are left to the other one.

    `codec` knows all parameters of the transport, and belongs to one engine.
    """

    _slices: Sequence[Slice] = ()  # of the bucket

    def __init__(self, base: Transport, codec: Codec):
        self._codec = codec
        self._take(base)

    def _take(self, base: Transport) -> None:
        """Let everything that is not defined here be what it is in the other transport."""
        names = {*dir(Transport), *vars(base)} - set(vars(Coded))
        of_base = {name: getattr(base, name) for name in names if not name.startswith("_")}
        vars(self).update(of_base)
        self._base = base
        self.is_lossy = self.gathered_along.size > 1
        self.room_itemsize = int(self.is_lossy)

    @property
    def name(self) -> str:
        return f"{self._base.name} in {self._codec.name}"

    def open(self, device: torch.device, *, keeps_full: bool) -> Self:
        return type(self)(self._base.open(device, keeps_full=keeps_full), self._codec)

    def bind(self, ranges: Ranges, slices: Sequence[Slice] = ()) -> Self:
        bound = type(self)(self._base.bind(ranges, slices), self._codec)
        bound._slices = slices
        return bound

    def room(self, full: Tensor) -> Tensor | None:
        return full.new_empty(full.shape, dtype=torch.uint8) if self.is_lossy else None

    def gather(self, rest: Tensor, full: Tensor, room: Tensor | None = None) -> Work:
        if room is None:
            return self._base.gather(rest, full)
        elements, kept = self.ranges.elements, self.ranges.rest
        self.ranges.of_bucket(full, kept).copy_(rest)  # returns early if both are the same memory
        for where, part in self._parts(kept):
            self._codec.encode(where, cut(full, part, elements.start), cut(room, part, elements.start))
        sent = self._base.gather(self.ranges.of_bucket(room, kept), room)
        return Work(sent.wait, partial(self._decode_others, room, full))

    def round_trip(self, values: Tensor, elements: range) -> None:
        codes = values.new_empty(values.shape, dtype=torch.uint8)
        for where, part in self._parts(elements):
            own, own_codes = cut(values, part, elements.start), cut(codes, part, elements.start)
            self._codec.encode(where, own, own_codes)
            self._codec.decode(where, own_codes, own)

    def own_changed(self, owned: Iterable[tuple[Slice, Tensor]]) -> None:
        self._codec.measure(owned, self.owners)

    def _decode_others(self, codes: Tensor, full: Tensor) -> None:
        """Write the values of all codes but those of what this rank keeps."""
        elements, kept = self.ranges.elements, self.ranges.rest
        for others in (range(elements.start, kept.start), range(kept.stop, elements.stop)):
            for where, part in self._parts(others):
                self._codec.decode(where, cut(codes, part, elements.start), cut(full, part, elements.start))

    def _parts(self, elements: range) -> Iterator[tuple[Slice, range]]:
        """Iterate over the parts of parameters in a range of the bucket, each with its elements."""
        for where in self._slices:
            if part := overlap(where.elements, elements):
                yield where._replace(elements=part), part
