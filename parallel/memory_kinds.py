"""Kinds of memory: the purpose of each storage, which observers of operations are told when it is allocated.

A run has no observer, and `tagged` and `allocating` cost next to nothing. An instrument joins the list `observers` of a
dispatch mode.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, StrEnum

import torch
from torch import Tensor

from parallel.torch_internals import active_observers


class TensorKind(StrEnum):
    """The purpose of a storage. A temporary tensor has the kind of the tensors that it is computed from or for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    MASTER = "master"
    MOMENTS = "moments"
    CHECKPOINTS = "checkpoints"
    ACTIVATIONS = "activations"
    BUFFERS = "buffers"
    OTHER = "other"


class Placement(Enum):
    """One of the two memories of a rank."""

    ACCELERATOR = "the memory of the device that computes"
    HOST = "host memory, pinned if the device is a GPU"


class MemoryObserver(ABC):
    """An observer of operations that is told the kinds of tensors. `default` is (kind, on_host) of those untagged.

    It is a base class and no protocol, because `tagged` asks for the type of each observer each time.
    """

    default: tuple[TensorKind, bool]

    @abstractmethod
    def on_tag(self, tensor: Tensor, kind: TensorKind, on_host: bool) -> None: ...

    def restart_peak(self) -> None:  # noqa: B027
        """Let `peak_bytes` count from now on, if this observer counts memory."""

    def peak_bytes(self) -> int:
        """Return the most bytes of the accelerator since `restart_peak`; 0 if this observer does not count memory."""
        return 0


def tagged(kind: TensorKind, tensor: Tensor, *, on_host: bool = False) -> Tensor:
    """Return the tensor; active observers count its storage as `kind` from now on, in host memory if `on_host`.

    If the CPU is the run's accelerator, only `on_host` distinguishes host memory from the accelerator's.
    """
    for observer in _memory_observers():
        observer.on_tag(tensor, kind, on_host)
    return tensor


def allocate_buffer(like: Tensor, numel: int) -> Tensor:
    """Return an uninitialized tensor (numel,) of the dtype and device of `like`, which counts as BUFFERS."""
    return tagged(TensorKind.BUFFERS, like.new_empty(numel))


@contextmanager
def allocating(kind: TensorKind, *, on_host: bool = False) -> Iterator[None]:
    """Count storages that are allocated in this block, and not tagged, as `kind`; the innermost block wins."""
    observers = _memory_observers()
    outer = [observer.default for observer in observers]
    for observer in observers:
        observer.default = kind, on_host
    try:
        yield
    finally:
        for observer, before in zip(observers, outer, strict=True):
            observer.default = before


class PeakMeter:
    """A meter of a device's peak since `restart`, read from CUDA's allocator, on a CPU from the active observers."""

    def __init__(self, device: torch.device):
        self._device = device

    def restart(self) -> None:
        if self._device.type == "cuda":
            _peaks_before_restart[_index(self._device)] = highest_peaks(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        for observer in _memory_observers():
            observer.restart_peak()

    def peak_bytes(self) -> int:
        """Return the most bytes that were allocated at once since `restart`; 0 on a CPU without an active tracker."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max((observer.peak_bytes() for observer in _memory_observers()), default=0)


def highest_peaks(device: torch.device) -> tuple[int, int]:
    """Return the most (allocated, reserved) bytes of a CUDA device in this process, also before a meter's restarts.

    CUDA has one peak for all readers.
    """
    allocated, reserved = _peaks_before_restart.get(_index(device), (0, 0))
    now = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return max(allocated, now[0]), max(reserved, now[1])


_peaks_before_restart: dict[int, tuple[int, int]] = {}  # by the number of the device


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _memory_observers() -> list[MemoryObserver]:
    return [observer for observer in active_observers() if isinstance(observer, MemoryObserver)]
