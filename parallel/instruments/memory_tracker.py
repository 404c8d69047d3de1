"""Tracking memory: what tensors occupy, what they are, and the most that was occupied at once.

    with MemoryTracker(device) as tracker:    follows every storage from its allocation to its death; views share one
        ...
    tracker.device.peak                       {TensorKind.PARAMETERS: bytes, ...} at the moment of the highest total

Python sees every operation while a tracker is active, so a step under it is slow. Without one, the tags below cost
a look at an empty stack.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload

from parallel.instruments.watching import active_watchers, watching


class TensorKind(StrEnum):
    """What a storage is for. A temporary is of the kind of what it belongs to."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    MASTER = "master"
    MOMENTS = "moments"
    CHECKPOINTS = "checkpoints"
    ACTIVATIONS = "activations"
    BUFFERS = "buffers"
    OTHER = "other"


def tagged(kind: TensorKind, tensor: Tensor, *, on_host: bool = False) -> Tensor:
    """The same tensor; an active tracker counts its storage as `kind` from now on, and in host memory if told so.

    Where a run's accelerator is the CPU itself, only `on_host` tells the two kinds of memory apart.
    """
    for tracker in _active_trackers():
        tracker._tag(tensor, kind, on_host)
    return tensor


def allocate_buffer(like: Tensor, numel: int) -> Tensor:
    """Return an uninitialized tensor (numel,) of the dtype and device of `like`, which counts as BUFFERS."""
    return tagged(TensorKind.BUFFERS, like.new_empty(numel))


@contextmanager
def allocating(kind: TensorKind, *, on_host: bool = False) -> Iterator[None]:
    """What is allocated in here, and not tagged, is of this kind: the innermost one counts."""
    trackers = _active_trackers()
    outer = [tracker._ambient for tracker in trackers]
    for tracker in trackers:
        tracker._ambient = kind, on_host
    try:
        yield
    finally:
        for tracker, before in zip(trackers, outer, strict=True):
            tracker._ambient = before


@dataclass(eq=False)
class Memory:
    """One memory, in bytes by kind: now, and at the moment of the highest total since `restart`."""

    resident: Counter[TensorKind] = field(default_factory=Counter)
    peak: Counter[TensorKind] = field(default_factory=Counter)
    num_allocations: Counter[TensorKind] = field(default_factory=Counter)
    total: int = 0
    peak_total: int = 0
    metered_peak: int = 0  # of a `PeakMeter`

    def restart(self) -> None:
        self.peak, self.peak_total = self.resident.copy(), self.total
        self.num_allocations.clear()

    def change(self, kind: TensorKind, num_bytes: int) -> None:
        self.resident[kind] += num_bytes
        self.total += num_bytes
        self.metered_peak = max(self.metered_peak, self.total)
        if self.total >= self.peak_total:  # equal after a tag: the peak then has the new kind
            self.peak, self.peak_total = self.resident.copy(), self.total


@dataclass
class _Holding:
    """One living storage."""

    memory: Memory
    kind: TensorKind
    reference: weakref.ref
    num_bytes: int = 0
    is_new: bool = False  # allocated since `restart`


class MemoryTracker:
    """Counts storages that are allocated while it is active; `device` is the run's accelerator, real or imitated.

    Fake tensors count as what they imitate: enter the tracker after the `FakeTensorMode`. A storage made before is
    counted when an operation first returns it.
    """

    def __init__(self, device: torch.device):
        self.device, self.host = Memory(), Memory()
        self._device_type = device.type
        self._ambient = TensorKind.OTHER, False  # kind, and whether in host memory
        self._holdings: dict[int, _Holding] = {}  # by the address of the storage

    def restart(self) -> None:
        """Begin a new stretch: peaks and allocations are those from now on."""
        self.device.restart()
        self.host.restart()
        for holding in self._holdings.values():
            holding.is_new = False

    def is_on_host(self, tensor: Tensor) -> bool:
        return self._meet(tensor).memory is self.host

    def __enter__(self) -> Self:
        # Resizing a storage is no operation: no dispatcher sees it.
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            if holding := self._holdings.get(storage._cdata):
                self._resized(holding, num_bytes)
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign,assignment]
        self._watching = ExitStack()
        self._watching.enter_context(watching(self))
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._watching.close()

    def saw(self, function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        if isinstance(output, Tensor):
            self._meet(output)
        elif isinstance(output, (tuple, list)):
            for part in output:
                if isinstance(part, Tensor):
                    self._meet(part)
                elif isinstance(part, (tuple, list)):  # collectives return lists of lists
                    for tensor in part:
                        if isinstance(tensor, Tensor):
                            self._meet(tensor)

    def _meet(self, tensor: Tensor) -> _Holding:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        holding = self._holdings.get(key)
        if holding is None:
            kind, on_host = self._ambient
            memory = self.device if tensor.device.type == self._device_type and not on_host else self.host
            holding = _Holding(memory, kind, weakref.ref(storage, partial(self._forget, key)))
            self._holdings[key] = holding
        if holding.num_bytes != num_bytes:
            self._resized(holding, num_bytes)
        return holding

    def _resized(self, holding: _Holding, num_bytes: int) -> None:
        if num_bytes > holding.num_bytes:
            holding.is_new = True
            holding.memory.num_allocations[holding.kind] += 1
        holding.memory.change(holding.kind, num_bytes - holding.num_bytes)
        holding.num_bytes = num_bytes

    def _tag(self, tensor: Tensor, kind: TensorKind, on_host: bool) -> None:
        """An allocation moves with its storage from kind to kind."""
        holding = self._meet(tensor)
        memory = self.host if on_host else holding.memory
        if memory is holding.memory and kind is holding.kind:
            return
        holding.memory.num_allocations[holding.kind] -= holding.is_new
        holding.memory.change(holding.kind, -holding.num_bytes)
        holding.memory, holding.kind = memory, kind
        memory.change(kind, holding.num_bytes)
        memory.num_allocations[kind] += holding.is_new

    def _forget(self, key: int, _reference: weakref.ref) -> None:
        holding = self._holdings.pop(key)
        holding.memory.change(holding.kind, -holding.num_bytes)


def _active_trackers() -> list[MemoryTracker]:
    return [watcher for watcher in active_watchers() if isinstance(watcher, MemoryTracker)]


class PeakMeter:
    """The most that a device has held since `restart`: what CUDA's allocator says, or else an active tracker."""

    def __init__(self, device: torch.device):
        self._device = device

    def restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        for tracker in _active_trackers():
            tracker.device.metered_peak = tracker.device.total

    def peak_bytes(self) -> int:
        """0 where nobody counts: a CPU's memory is no accelerator's."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max((tracker.device.metered_peak for tracker in _active_trackers()), default=0)
