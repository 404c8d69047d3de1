"""Where activation checkpoints wait between forward and backward: small classes with the two verbs `put` and `take`.

    keep             the checkpoint itself; with M_D, a copy in a slab
    partition        this rank's 1/N of it, gathered along the ranks that hold the same one: P_a (paper, section 6.1)
    partition_host   that part in host memory, which leaves nothing on the device: P_a+cpu

Stores copy what they cut: they change nothing that anyone else holds, and nobody changes what they hold.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.instruments.memory_tracker import TensorKind, tagged
from parallel.mesh import Axis, Handle
from zero.activations.slab import Memory, Pieces, Place, Slab
from zero.offload.host_memory import Allocate, on_device, on_host_of
from zero.offload.streams import SideStream

NUM_IN_TRANSIT = 2  # the checkpoint that is being read, and the one that is fetched meanwhile


@dataclass(frozen=True)
class StoredBytes:
    """What the checkpoints of one forward occupy."""

    device: int = 0
    host: int = 0
    in_transit: int = 0  # buffers on the device, whatever the number of checkpoints


class ActivationStore(Protocol):
    def put(self, place: Place, activation: Tensor) -> Any:
        """Called in forward with a checkpoint; returns what to remember it by."""

    def take(self, place: Place, stored: Any) -> tuple[Tensor, Handle]:
        """Called in backward, beside the computation (`SideStream.context`): starts to bring the same values. They may
        be read once the handle has been waited for, until two more have been taken."""

    def num_bytes(self, count: int, numel: int, itemsize: int) -> StoredBytes:
        """For `count` checkpoints of `numel` elements each."""


class KeepStore:
    """Keeps the checkpoint itself."""

    def put(self, place: Place, activation: Tensor) -> Tensor:
        return tagged(TensorKind.CHECKPOINTS, activation)

    def take(self, place: Place, stored: Tensor) -> tuple[Tensor, Handle]:
        return stored, Handle()

    def num_bytes(self, count: int, numel: int, itemsize: int) -> StoredBytes:
        return StoredBytes(device=count * numel * itemsize)


class CopyStore:
    """Keeps a copy in memory of the same device."""

    def __init__(self, memory: Memory):
        self._memory = memory

    def put(self, place: Place, activation: Tensor) -> Tensor:
        copy = self._memory.at(place, activation.numel(), activation.dtype)
        return copy.view(activation.shape).copy_(activation)

    def take(self, place: Place, stored: Tensor) -> tuple[Tensor, Handle]:
        return stored, Handle()

    def num_bytes(self, count: int, numel: int, itemsize: int) -> StoredBytes:
        return StoredBytes(device=count * numel * itemsize)


class HostStore:
    """Keeps a copy in host memory. Both ways it passes through a place of its own on the device, one of a few."""

    def __init__(self, host: Memory, transit: Memory, stream: SideStream):
        self._host, self._transit, self._stream = host, transit, stream
        self._leaving: dict[Place, tuple[Tensor, Handle]] = {}

    def put(self, place: Place, activation: Tensor) -> tuple[Tensor, torch.Size]:
        ring = place.on_ring(NUM_IN_TRANSIT)
        if ring in self._leaving:
            self._leaving.pop(ring)[1].wait()
        size = activation.numel(), activation.dtype
        passing, stored = self._transit.at(ring, *size), self._host.at(place, *size)
        passing.view(activation.shape).copy_(activation)
        with self._stream.context():
            stored.copy_(passing, non_blocking=True)
        self._leaving[ring] = passing, self._stream.device_handle()  # held: until then it is being read
        return stored, activation.shape

    def take(self, place: Place, stored: tuple[Tensor, torch.Size]) -> tuple[Tensor, Handle]:
        on_host, shape = stored
        passing = self._transit.at(place.on_ring(NUM_IN_TRANSIT), on_host.numel(), on_host.dtype)
        return passing.copy_(on_host, non_blocking=True).view(shape), Handle()

    def num_bytes(self, count: int, numel: int, itemsize: int) -> StoredBytes:
        return StoredBytes(host=count * numel * itemsize, in_transit=NUM_IN_TRANSIT * numel * itemsize)


class PartitionStore:
    """Hands this rank's equal part of a checkpoint, which all ranks of `replicas` hold alike, to another store."""

    def __init__(self, replicas: Axis, parts: ActivationStore, gathered: Memory):
        self._replicas, self._parts, self._gathered = replicas, parts, gathered

    def put(self, place: Place, activation: Tensor) -> tuple[Any, torch.Size]:
        return self._parts.put(place, self._own_part(activation.reshape(-1))), activation.shape

    def take(self, place: Place, stored: tuple[Any, torch.Size]) -> tuple[Tensor, Handle]:
        part, shape = stored
        own, arrived = self._parts.take(place, part)
        whole = self._gathered.at(place.on_ring(NUM_IN_TRANSIT), own.numel() * self._replicas.size, own.dtype)
        gathered = arrived.then(lambda: self._replicas.all_gather(own, out=whole))
        return whole[: shape.numel()].view(shape), gathered

    def num_bytes(self, count: int, numel: int, itemsize: int) -> StoredBytes:
        part_numel = self._part_numel(numel)
        parts = self._parts.num_bytes(count, part_numel, itemsize)
        gathered = NUM_IN_TRANSIT * part_numel * self._replicas.size * itemsize
        return replace(parts, in_transit=parts.in_transit + gathered)

    def _part_numel(self, numel: int) -> int:
        return math.ceil(numel / self._replicas.size)

    def _own_part(self, flat: Tensor) -> Tensor:
        """TrainState are of one size; the last ones are filled up with zeros."""
        numel = self._part_numel(flat.numel())
        part = flat[self._replicas.rank * numel :][:numel]
        return part if part.numel() == numel else F.pad(part, (0, numel - part.numel()))


@dataclass(frozen=True)
class StoreContext:
    """What stores are made of."""

    replicas: Axis  # ranks that hold the same checkpoints
    device: torch.device
    stream: SideStream
    defragments: bool

    def on_device(self) -> Memory:
        return self._memory(on_device(self.device, TensorKind.CHECKPOINTS))

    def on_host(self) -> Memory:
        return self._memory(on_host_of(self.device, TensorKind.CHECKPOINTS))

    def in_transit(self) -> Memory:
        return self._memory(on_device(self.device, TensorKind.BUFFERS))

    def _memory(self, allocate: Allocate) -> Memory:
        return Slab(allocate) if self.defragments else Pieces(allocate)


def keep(around: StoreContext) -> ActivationStore:
    return CopyStore(around.on_device()) if around.defragments else KeepStore()


def partition(around: StoreContext) -> ActivationStore:
    return PartitionStore(around.replicas, CopyStore(around.on_device()), around.in_transit())


def partition_host(around: StoreContext) -> ActivationStore:
    """Where every rank's checkpoints are its own there is nothing to cut, and the whole goes to the host."""
    host = HostStore(around.on_host(), around.in_transit(), around.stream)
    return PartitionStore(around.replicas, host, around.in_transit()) if around.replicas.size > 1 else host


# The one list of stores, from the cheapest to the most expensive: settings, choice and planner read it.
StoreName = Literal["keep", "partition", "partition_host"]
STORES: dict[StoreName, Callable[[StoreContext], ActivationStore]] = {
    "keep": keep,
    "partition": partition,
    "partition_host": partition_host,
}
