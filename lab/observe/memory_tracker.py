"""A tracker of memory: the bytes that tensors of each kind occupy, now and at the peak of the total.

While a tracker is active, every operation calls Python code, so a step is slow.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from lab.observe.operation_observer import observe_operations
from lab.observe.torch_internals import observe_resizes
from parallel.memory_kinds import MemoryObserver, TensorKind
from parallel.torch_internals import OpOverload, storage_id


@dataclass(eq=False)
class MemoryUsage:
    """The use of one memory, in bytes by kind: now, and at the moment of the highest total since `restart`."""

    resident: Counter[TensorKind] = field(default_factory=Counter)
    peak: Counter[TensorKind] = field(default_factory=Counter)
    num_allocations: Counter[TensorKind] = field(default_factory=Counter)
    total: int = 0
    peak_total: int = 0
    metered_peak: int = 0  # the highest total since a `PeakMeter` was restarted
    history: "MemoryHistory | None" = None  # keeps the changes, if there is one

    def restart(self) -> None:
        self.peak, self.peak_total = self.resident.copy(), self.total
        self.num_allocations.clear()

    def change(self, kind: TensorKind, num_bytes: int) -> None:
        self.resident[kind] += num_bytes
        self.total += num_bytes
        if self.history:
            self.history.changes.append((self.history.clock(), kind, num_bytes))
        self.metered_peak = max(self.metered_peak, self.total)
        if self.total >= self.peak_total:  # also if equal: a tag at the peak moves bytes to another kind
            self.peak, self.peak_total = self.resident.copy(), self.total


@dataclass(eq=False)
class MemoryHistory:
    """The bytes of each kind at one moment, and the changes since then: (time of `clock`, kind, bytes).

    `storages` has each allocation, also those that are resident at the start, and, with negative bytes, each release:
    (storage, bytes). A storage that is gone may have the number of a later one.
    """

    start: Counter[TensorKind]
    clock: Callable[[], int]
    changes: list[tuple[int, TensorKind, int]] = field(default_factory=list)
    storages: list[tuple[int, int]] = field(default_factory=list)

    def states(self) -> Iterator[tuple[int, Counter[TensorKind]]]:
        """Yield (time, bytes of each kind): at the start, and after each change. The counter is the same one."""
        now = self.start.copy()
        yield 0, now
        for time, kind, num_bytes in self.changes:
            now[kind] += num_bytes
            yield time, now

    def at_times(self, places: Sequence[int]) -> Self:
        """Return the history with another clock, which shows `places[time]` where the own one shows `time`."""
        changes = [(places[time], kind, num_bytes) for time, kind, num_bytes in self.changes]
        return replace(self, changes=changes)


@dataclass
class _TrackedStorage:
    """A storage that has not been freed."""

    memory: MemoryUsage
    kind: TensorKind
    reference: weakref.ref
    num_bytes: int = 0
    is_new: bool = False  # allocated since `restart`


class MemoryTracker(MemoryObserver):
    """A counter of the storages that are allocated while it is active; `device` is the accelerator, real or imitated.

    A fake tensor counts like the real one that it imitates, if the tracker is entered after the `FakeTensorMode`. A
    storage that is older than the tracker is counted when an operation first returns it. Views count once, with their
    storage. While a tracker is active, `torch.UntypedStorage.resize_` is replaced for the whole process.
    """

    def __init__(self, device: torch.device):
        self.device, self.host = MemoryUsage(), MemoryUsage()
        self._device_type = device.type
        self.default = TensorKind.OTHER, False  # (kind, on_host) of storages that are not tagged
        self._storages: dict[int, _TrackedStorage] = {}  # by `storage_id`

    def restart(self) -> None:
        """Count peaks and allocations from now on; what is resident stays counted."""
        self.device.restart()
        self.host.restart()
        for tracked in self._storages.values():
            tracked.is_new = False

    @contextmanager
    def keeping_history(self, clock: Callable[[], int]) -> Iterator[MemoryHistory]:
        """Return a record of the device's memory, to which each change in the block is added at the time of `clock`."""
        self.device.history = MemoryHistory(self.device.resident.copy(), clock)
        for key, tracked in self._storages.items():
            self._log(key, tracked, tracked.num_bytes)
        try:
            yield self.device.history
        finally:
            self.device.history = None

    def restart_peak(self) -> None:
        self.device.metered_peak = self.device.total

    def peak_bytes(self) -> int:
        return self.device.metered_peak

    def is_on_host(self, tensor: Tensor) -> bool:
        return self._track(tensor).memory is self.host

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(observe_resizes(self._on_resize))
            stack.enter_context(observe_operations(self))
            self._active = stack.pop_all()  # if the second raises, the first has been exited
        return self

    def __exit__(self, *exception: Any) -> None:
        self._active.close()

    def on_operation(self, function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor):
                self._track(tensor)

    def _track(self, tensor: Tensor) -> _TrackedStorage:
        """Return the record of the tensor's storage; create it if the storage is new to this tracker."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage_id(storage), storage.nbytes() if tensor.device.type != "meta" else 0
        tracked = self._storages.get(key)
        if tracked is None:
            kind, on_host = self.default
            memory = self.device if tensor.device.type == self._device_type and not on_host else self.host
            tracked = _TrackedStorage(memory, kind, weakref.ref(storage, partial(self._on_free, key)))
            self._storages[key] = tracked
        if tracked.num_bytes != num_bytes:
            self._set_size(key, tracked, num_bytes)
        return tracked

    def _on_resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if tracked := self._storages.get(key := storage_id(storage)):
            self._set_size(key, tracked, num_bytes)

    def _on_free(self, key: int, _reference: weakref.ref) -> None:
        tracked = self._storages.pop(key)
        self._log(key, tracked, -tracked.num_bytes)
        tracked.memory.change(tracked.kind, -tracked.num_bytes)

    def _log(self, key: int, tracked: _TrackedStorage, num_bytes: int) -> None:
        if tracked.memory.history and num_bytes:
            tracked.memory.history.storages.append((key, num_bytes))

    def _set_size(self, key: int, tracked: _TrackedStorage, num_bytes: int) -> None:
        if num_bytes > tracked.num_bytes:
            tracked.is_new = True
            tracked.memory.num_allocations[tracked.kind] += 1
        self._log(key, tracked, num_bytes - tracked.num_bytes)
        tracked.memory.change(tracked.kind, num_bytes - tracked.num_bytes)
        tracked.num_bytes = num_bytes

    def on_tag(self, tensor: Tensor, kind: TensorKind, on_host: bool) -> None:
        """Move the bytes of the tensor's storage, and its allocation if that is new, to another kind or memory."""
        tracked = self._track(tensor)
        memory = self.host if on_host else tracked.memory
        if memory is tracked.memory and kind is tracked.kind:
            return
        if memory is not tracked.memory:
            self._log(storage_id(tensor.untyped_storage()), tracked, -tracked.num_bytes)
        # Subtracted before they are added: the other order would record a peak that never was.
        tracked.memory.num_allocations[tracked.kind] -= tracked.is_new
        tracked.memory.change(tracked.kind, -tracked.num_bytes)
        tracked.memory, tracked.kind = memory, kind
        memory.change(kind, tracked.num_bytes)
        memory.num_allocations[kind] += tracked.is_new
