"""Stores of activation checkpoints between forward and backward: small classes with `put` and `take`.

    keep             the checkpoint itself; with M_D, a copy in a slab
    partition        1/N of it on each of N ranks that hold the same checkpoint, gathered in backward: P_a (section 6.1)
    partition_host   that part in host memory, so that nothing stays on the device: P_a+cpu

A store never writes to a tensor of its caller. Every store except `keep` without a slab copies what it is given.

    slab        | slot 0 | slot 1 | ... | slot n-1 |   allocated once for each size: M_D (paper, section 6.3)
    separate    slot 0 ...  slot 1 .....  slot n-1     allocated in each forward, wherever there is room

Checkpoints are kept long, and the tensors that are allocated between them are freed soon. Without a slab, checkpoints
fragment the memory.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.memory_kinds import TensorKind, tagged
from parallel.mesh import Axis, Work
from zero.core.memory.allocators import Allocate, Allocator, device_allocator, host_allocator
from zero.core.memory.streams import SideStream

NUM_IN_TRANSIT = 2  # buffers: of the checkpoint that is being read, and of the one that is fetched at the same time


@dataclass(frozen=True)
class Slot:
    """The position of one of `count` equal ranges of memory."""

    number: int
    count: int

    def in_ring(self, count: int) -> "Slot":
        """Return the slot to use instead if only `count` slots exist, which are used in turn."""
        return Slot(self.number % count, count)


class SlotMemory:
    """A source of memory for checkpoints.

    If it defragments, it returns the same memory every time for the same slot, size and dtype, and the caller must no
    longer need the earlier content of the slot. Else it allocates new memory in each call, which is freed when no
    reference to the tensor is left.
    """

    def __init__(self, allocate: Allocate, defragments: bool):
        self._allocate, self._defragments = allocate, defragments
        self._slabs: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def at(self, slot: Slot, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of `numel` elements, not initialized."""
        if not self._defragments:
            return self._allocate(numel, dtype)
        key = slot.count, numel, dtype
        if key not in self._slabs:
            self._slabs[key] = self._allocate(slot.count * numel, dtype).view(slot.count, numel)
        return self._slabs[key][slot.number]


class ActivationStore(Protocol):
    """The interface of a store."""

    def put(self, slot: Slot, activation: Tensor) -> Any:
        """Store a checkpoint in forward, and return what `take` needs to find it."""

    def take(self, slot: Slot, stored: Any) -> tuple[Tensor, Work]:
        """Start to fetch a checkpoint in backward; return its tensor, and a `Work` to wait on before it is read.

        The caller makes the side stream current first, and waits for that stream too. The second `take` after this one
        may overwrite the tensor.
        """


class KeepStore:
    """A store that keeps the checkpoints themselves on the device, or copies of them in `memory`."""

    def __init__(self, memory: SlotMemory | None = None):
        self._memory = memory

    def put(self, slot: Slot, activation: Tensor) -> tuple[Tensor, int | None]:
        if self._memory is None:
            return tagged(TensorKind.CHECKPOINTS, activation), activation._version
        copy = self._memory.at(slot, activation.numel(), activation.dtype)
        return copy.view(activation.shape).copy_(activation), None

    def take(self, slot: Slot, stored: tuple[Tensor, int | None]) -> tuple[Tensor, Work]:
        kept, version = stored
        if version not in (None, kept._version):  # torch checks this for tensors that no hook has packed
            raise RuntimeError(f"checkpoint {slot.number} was modified in place; set ActivationsConfig.defragment=true")
        return kept, Work()


class HostStore:
    """A store that keeps copies in host memory. Both directions pass through a few staging buffers on the device."""

    def __init__(self, host: SlotMemory, staging: SlotMemory, stream: SideStream):
        self._host, self._staging, self._stream = host, staging, stream
        self._copies_to_host: dict[Slot, tuple[Tensor, Work]] = {}  # the last one from each staging buffer

    def put(self, slot: Slot, activation: Tensor) -> tuple[Tensor, torch.Size]:
        ring_slot = slot.in_ring(NUM_IN_TRANSIT)
        # First: the side stream must have read the staging buffer before the computation overwrites it.
        if ring_slot in self._copies_to_host:
            _, earlier_copy = self._copies_to_host.pop(ring_slot)
            earlier_copy.wait()
        size = activation.numel(), activation.dtype
        staged, stored = self._staging.at(ring_slot, *size), self._host.at(slot, *size)
        staged.view(activation.shape).copy_(activation)
        # After the copy above: `context` makes the side stream wait for what the computation has queued.
        with self._stream.context():
            stored.copy_(staged, non_blocking=True)
        # The reference to `staged` keeps it allocated until the side stream has read it.
        self._copies_to_host[ring_slot] = staged, self._stream.device_work()
        return stored, activation.shape

    def take(self, slot: Slot, stored: tuple[Tensor, torch.Size]) -> tuple[Tensor, Work]:
        on_host, shape = stored
        # The side stream runs this copy after the copies of every `put`, so it may overwrite their staging buffers.
        staged = self._staging.at(slot.in_ring(NUM_IN_TRANSIT), on_host.numel(), on_host.dtype)
        return staged.copy_(on_host, non_blocking=True).view(shape), Work()


class PartitionStore:
    """A store that cuts a checkpoint into equal parts and puts this rank's part into the store `parts`.

    All ranks of `replicas` hold the same checkpoint. `gathered` is memory for checkpoints that have been gathered.
    """

    def __init__(self, replicas: Axis, parts: ActivationStore, gathered: SlotMemory):
        self._replicas, self._parts, self._gathered = replicas, parts, gathered

    def put(self, slot: Slot, activation: Tensor) -> tuple[Any, torch.Size]:
        return self._parts.put(slot, self._own_part(activation.reshape(-1))), activation.shape

    def take(self, slot: Slot, stored: tuple[Any, torch.Size]) -> tuple[Tensor, Work]:
        stored_part, shape = stored
        part, fetched = self._parts.take(slot, stored_part)
        whole = self._gathered.at(slot.in_ring(NUM_IN_TRANSIT), part.numel() * self._replicas.size, part.dtype)
        # NCCL runs the tensor all-reduces of the group that is computed meanwhile behind this gather, which waits for a
        # copy from the host. Its 2 bytes an element have arrived before the first all-reduce is due, which needs
        # 8 * hidden FLOPs an element, if hidden > FLOPs/s / (4 * bytes/s): 800 on a V100, 2,000 on an H100.
        gathered = fetched.then(lambda: self._replicas.all_gather(part, out=whole))
        return whole[: shape.numel()].view(shape), gathered

    def _own_part(self, flat: Tensor) -> Tensor:
        """Return this rank's part. All parts have the same size; the last ones are padded with zeros."""
        numel = math.ceil(flat.numel() / self._replicas.size)
        part = flat[self._replicas.rank * numel :][:numel]
        return part if part.numel() == numel else F.pad(part, (0, numel - part.numel()))


# All stores, from the cheapest to the most expensive: the settings, the choice of `auto` and the planner read this.
StoreName = Literal["keep", "partition", "partition_host"]
STORES: tuple[StoreName, ...] = get_args(StoreName)


def make_store(
    name: StoreName, replicas: Axis, device: torch.device, stream: SideStream, defragments: bool
) -> ActivationStore:
    """Return a store of checkpoints that the ranks of `replicas` all hold; with M_D, it allocates slabs."""

    def memory(allocator: Allocator, kind: TensorKind = TensorKind.CHECKPOINTS) -> SlotMemory:
        return SlotMemory(allocator(device, kind), defragments)

    if name == "keep":
        return KeepStore(memory(device_allocator) if defragments else None)
    parts: ActivationStore = KeepStore(memory(device_allocator))
    if name == "partition_host":
        parts = HostStore(memory(host_allocator), memory(device_allocator, TensorKind.BUFFERS), stream)
        if replicas.size == 1:  # the part of a rank is all
            return parts
    return PartitionStore(replicas, parts, memory(device_allocator, TensorKind.BUFFERS))


@dataclass(frozen=True)
class StoredBytes:
    """The bytes that the checkpoints of one forward occupy."""

    device: int = 0
    host: int = 0
    in_transit: int = 0  # of buffers on the device, whose number does not depend on the number of checkpoints


def stored_bytes(store: StoreName, count: int, numel: float, itemsize: int, num_replicas: int) -> StoredBytes:
    """Return the bytes of `count` checkpoints, of `numel` elements each, on each of the ranks that hold the same."""
    part_bytes = math.ceil(numel / num_replicas) * itemsize
    gathered = NUM_IN_TRANSIT * part_bytes * num_replicas if num_replicas > 1 else 0
    match store:
        case "keep":
            return StoredBytes(device=count * math.ceil(numel) * itemsize)
        case "partition":
            return StoredBytes(device=count * part_bytes, in_transit=gathered)
        case "partition_host":
            return StoredBytes(host=count * part_bytes, in_transit=NUM_IN_TRANSIT * part_bytes + gathered)
