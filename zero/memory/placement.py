"""The placement of model states in device or host memory, and the copies between the two.

    accelerator     full parameters and gradients while in use, and the states that are placed there
                        | gradients, reduced     ^ parameters, cast     each direction on a side stream of its own
                        v                        |
    host (pinned)   the states that are placed there

On a CPU both are host memory: the same copies are made, in the same order.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Annotated, Literal

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind, allocating, tagged
from parallel.mesh import Work
from parallel.torch_internals import storage_id
from parallel.validation.errors import MemoryLimitError
from parallel.validation.fields import Positive, Range, checked
from zero.memory.staging import Allocate, BufferPool
from zero.memory.streams import SideStream

NUM_BUFFERS = 2  # on the way from one memory to the other: one is filled while the other is copied

Mode = Literal["accelerator", "host", "auto"]
State = Literal["optimizer", "parameters"]
Allocator = Callable[[torch.device, TensorKind], Allocate]


class Placement(Enum):
    """One of the two memories of a rank."""

    ACCELERATOR = "the memory of the device that computes"
    HOST = "host memory, pinned if the device is a GPU"


@checked
class OffloadConfig:
    """The model states that are stored in host memory: none, all of `states`, or those that do not fit elsewhere."""

    mode: Mode = "accelerator"
    """accelerator: no state is offloaded; host: all of `states` are; auto: only those that do not fit on the
    accelerator (Gemini)."""
    states: tuple[State, ...] = ("optimizer", "parameters")
    """The states that may be offloaded. optimizer: owned gradients, master weights and moments, updated by the host;
    parameters: the shards of stage 3, which are copied to the accelerator for every all-gather."""
    accelerator_memory_gb: Annotated[float, Range(above=0, at_most=1e9)] | None = None
    """Limit of the memory that the process may use on the accelerator, in 1e9 bytes. A run that needs more in one of
    its first two steps ends there, and says how much more. null: no limit or, with auto, nine tenths of the device."""
    hidden_dim: Positive = 1024
    """auto: chunk sizes are searched in steps of this many elements; the model's hidden size suits its blocks best."""
    min_chunk_size_m: Annotated[float, Range(above=0, at_most=2**20)] = 32.0
    """auto: the smallest chunk size to try, in 2**20 elements."""
    search_range_m: Annotated[float, Range(0, 2**20)] = 32.0
    """auto: how far above the smallest size to search, in 2**20 elements."""

    @property
    def offloaded_states(self) -> set[State]:
        """The states that may be in host memory."""
        return set() if self.mode == "accelerator" else set(self.states)

    def initial_placement(self, state: State) -> Placement:
        """Return where a kind of state is allocated; with auto, the planner moves some buckets later."""
        return Placement.HOST if state in self.offloaded_states else Placement.ACCELERATOR


NO_OFFLOAD = OffloadConfig()


def device_allocator(device: torch.device, kind: TensorKind) -> Allocate:
    """Return an allocator of memory on `device`."""
    return lambda numel, dtype: tagged(kind, torch.empty(numel, dtype=dtype, device=device))


def host_allocator(device: torch.device, kind: TensorKind) -> Allocate:
    """Return an allocator of host memory, pinned if `device` is a GPU so that copies run beside the computation.

    The allocator raises MemoryLimitError if the host does not have as much memory as is asked for.
    """

    def allocate(numel: int, dtype: torch.dtype) -> Tensor:
        try:
            with allocating(kind, on_host=True):
                return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")
        except RuntimeError as error:
            raise MemoryLimitError(
                f"{numel * dtype.itemsize / 1e9:,.3g} GB of host memory for {kind} could not be allocated: "
                f"{str(error).splitlines()[0]}; offload less, or allow the process more (pinned) memory"
            ) from error

    return allocate


ALLOCATORS = {Placement.ACCELERATOR: device_allocator, Placement.HOST: host_allocator}


class Offload:
    """The two memories of a rank: allocates in either, and launches copies between them on side streams."""

    def __init__(self, device: torch.device, config: OffloadConfig = NO_OFFLOAD):
        self.device, self.config = device, config
        self._to_host, self._to_accelerator = SideStream(device), SideStream(device)
        on_host = host_allocator(device, TensorKind.BUFFERS)
        self._reads = BufferPool(on_host, num_in_turn=NUM_BUFFERS)
        self._casts = BufferPool(on_host, num_in_turn=NUM_BUFFERS)  # on their way to the accelerator
        self.relays = BufferPool(device_allocator(device, TensorKind.BUFFERS), num_in_turn=NUM_BUFFERS)
        """For what is stored on the host, and communicated on the accelerator."""
        self.gradients = BufferPool(device_allocator(device, TensorKind.BUFFERS))
        """For gradients on their way to the host, if they are cast, and from there, if there are several
        micro-batches."""
        self._landing: dict[int, Work] = {}  # the last copy to each storage in host memory

    def new(self, placement: Placement, kind: TensorKind, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor, not initialized."""
        return ALLOCATORS[placement](self.device, kind)(numel, dtype)

    def device_of(self, placement: Placement) -> torch.device:
        """Return the torch device on which tensors of this placement are updated."""
        return torch.device("cpu") if placement is Placement.HOST else self.device

    def to_host(self, source: Tensor, out: Tensor) -> Work:
        """Launch a copy to the host, and return a `Work`.

        Keep the `Work` until its `wait`: it keeps `source` allocated. Wait before `source` is overwritten. The host
        calls `synchronize` before it reads `out`.
        """
        with self._to_host.context():
            out.copy_(source, non_blocking=True)
        self._landing[storage_id(out.untyped_storage())] = self._to_host.device_work()
        return Work(self._to_host.device_work().wait, lambda: source)  # the `Work` keeps `source` allocated

    def to_accelerator(self, source: Tensor, out: Tensor, then: Callable[[], Work] = Work) -> Work:
        """Launch a copy to the accelerator, and behind it what `then` launches, such as an all-gather.

        Wait on the `Work` before `out` is read. A copy of `source` to the host may still be running. If the dtypes are
        equal, `source` is read asynchronously: the host calls `synchronize` before it overwrites `source`. If they
        differ, the host casts `source` into a buffer first, and may overwrite it when this returns.
        """
        cast, landing = None, self._landing.pop(storage_id(source.untyped_storage()), None)
        if source.dtype != out.dtype:
            if landing:
                self._to_host.host_work().wait()
            cast = self._casts.take(out.dtype, out.numel())
            source = cast[: source.numel()].copy_(source)
        with self._to_accelerator.context():
            if landing:
                landing.wait()  # first: a copy to the host may still write `source`
            out.copy_(source, non_blocking=True)
            followed = then()
        if cast is not None:
            self._casts.put_back(cast, self._to_accelerator.host_work())
        return Work(self._to_accelerator.device_work().wait, followed.wait)

    def read_from(self, placement: Placement, sources: Iterable[Tensor]) -> Iterator[Tensor]:
        """Iterate over tensors on the accelerator as `placement` reads them: themselves, or copies in host memory.

        The next tensor is copied while the caller uses this one. A copy is overwritten after the next one is asked for.
        """
        if placement is Placement.ACCELERATOR:
            yield from sources
            return
        reads = map(self._start_read, sources)
        following = next(reads, None)
        while following is not None:
            (copy, copied), following = following, next(reads, None)
            copied.wait()
            yield copy

    def scalars_on(self, placement: Placement, *scalars: Tensor) -> tuple[Tensor, ...]:
        """Return 0-dim tensors of the accelerator where `placement` uses them; the host waits for their copies."""
        if placement is Placement.ACCELERATOR:
            return scalars
        return tuple(self.new(placement, TensorKind.BUFFERS, 1, each.dtype).copy_(each)[0] for each in scalars)

    def synchronize(self) -> None:
        """Block the host until all copies have ended: it may then read their outputs and overwrite their inputs."""
        self._to_host.host_work().wait()
        self._to_accelerator.host_work().wait()
        self._landing.clear()

    def _start_read(self, source: Tensor) -> tuple[Tensor, Work]:
        """Launch a copy to one of a few pinned buffers; return it with a `Work` that blocks the host."""
        buffer = self._reads.take(source.dtype, source.numel())
        self._reads.put_back(buffer, Work())  # its turn comes again after that of the other one
        copy = buffer[: source.numel()]
        self.to_host(source, copy)
        return copy, self._to_host.host_work()
