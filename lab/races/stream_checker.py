"""A checker of streams: it follows a run on a CPU as if it were on a GPU, and reports what is not ordered by waits.

    with streams_checked(device):      raises StreamError at the end if the run in here would race on a GPU
        ...

It finds the waits that are missing on the paths that a run takes: `python -m lab.races.mutants` deletes one wait at a
time, to see that some test takes its path. Blocks are not compiled while operations are observed, so a test calls the
operations of compiled blocks by themselves (tests/distributed/lab/test_stream_scenarios.py).

The computation, each `SideStream`, each communicator (NCCL runs the collectives of a process group in order, on a
stream of its own) and the host are streams, with vector clocks:

    an operation      runs on the current stream, after all that the host has waited for before it was launched
    a collective      runs on its communicator's stream, after what the launching stream had queued; its `Work`'s `wait`
                      makes the current stream wait for it. What gloo does instead is not observed
    host memory       is read and written by copies on the current stream, and by the host itself: at once

Reported are accesses that a wait should order: reads before the last write, writes before earlier reads and writes, by
any two streams; memory that is freed and allocated again while another stream may use it (CUDA's allocator keeps memory
for the stream on which it was allocated, and gives it out at once); collectives for which nothing can wait any more.

On a CPU, memory counts as host memory if it is so tagged, and the results of the host's operations do. A copy between
device and host that a GPU would make, such as `.to("cpu")`, is then none, and counts where its result is read.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from lab.observe.fake_tensors import instances_in
from lab.observe.operation_observer import observe_operations
from lab.observe.torch_internals import observe_host_reads, observe_resizes
from lab.races.memory_accesses import AccessedMemory, MemoryPools, Roles, bytes_of, roles_of, sorted_arguments
from lab.races.simulated_streams import (
    Access,
    Launch,
    Message,
    SimulatedStream,
    SimulatedStreams,
    calling_places,
    describe,
    remedy,
)
from parallel.comm_log import CommEvent
from parallel.memory_kinds import MemoryObserver, TensorKind
from parallel.torch_internals import OpOverload, are_the_same_elements, storage_id

MAX_REPORTS = 10  # lines of an error


class StreamError(RuntimeError):
    """Raised if operations would race on a GPU."""


class SimulatedWait:
    """The wait for a collective: the function that `StreamSimulation.collective` returns."""

    def __init__(self, checker: "StreamChecker", access: Access, tensors: Any):
        self._checker, self._access = checker, access
        self._event = access.stream.record_event()
        self._tensors = tensors  # NCCL keeps them allocated until the wait
        self._was_called = False

    def __call__(self) -> None:
        self._was_called = True
        self._checker.current_stream.wait_event(self._event)
        self._tensors = None

    def __del__(self) -> None:
        if not self._was_called:
            self._checker.on_lost_wait(self._access)


class StreamChecker(MemoryObserver):
    """An observer of operations that is a `StreamSimulation`. `reports` are the races found so far, one line each.

    `device` is the run's accelerator, also if that is the CPU. Enter it before side streams are made.
    """

    simulates_streams = True

    def __init__(self, device: torch.device, *, records_launches: bool = False):
        self._device_type = device.type
        self.default = TensorKind.OTHER, False  # (kind, on_host) of storages that are not tagged
        self.reports: list[str] = []
        self._reported: set[tuple] = set()
        self._storages: dict[int, AccessedMemory] = {}  # by `storage_id`
        self._communicators: dict[Any, SimulatedStream] = {}  # by process group
        self._pools = MemoryPools()
        self._is_active = self._is_hidden = False
        self._streams = SimulatedStreams(records_launches)
        self._host = self._streams.host

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(observe_resizes(self._on_resize))
            stack.enter_context(observe_host_reads(self.on_host_read))
            stack.enter_context(observe_operations(self))
            self._active = stack.pop_all()
        self._is_active = True
        return self

    def __exit__(self, *exception: Any) -> None:
        self._is_active = False
        self._active.close()

    @property
    def launches(self) -> list[Launch]:
        """The launches, in the order of the host, if `records_launches`."""
        return self._streams.launches or []

    def raise_reports(self) -> None:
        """Raise StreamError with the reports since the last call, if there are any."""
        reports, self.reports = self.reports, []
        if reports:
            more = len(reports) - MAX_REPORTS
            lines = reports[:MAX_REPORTS] + ([f"and {more} more"] if more > 0 else [])
            raise StreamError("on a GPU this run would race:\n" + "\n".join(lines))

    @property
    def current_stream(self) -> SimulatedStream:
        return self._streams.current

    def new_stream(self) -> SimulatedStream:
        return self._streams.new_side_stream()

    def collective(
        self, group: Any, event: CommEvent, launch: Callable[[], Callable[[], object]], read: Tensor, written: Tensor
    ) -> SimulatedWait:
        communicator = self._communicators.get(group)
        if communicator is None:
            communicator = self._communicators[group] = self._streams.new_communicator(event.axis)
        for tensor in (read, written):
            # NCCL sends no host memory: on a GPU, `.to(axis.communication_device(...))` has copied it.
            self._memory_of(tensor).is_on_host = False
        communicator.wait_stream(self.current_stream)
        members = tuple(dist.get_process_group_ranks(group))
        access = communicator.launch(event.op, (members, event.message_bytes, event.dtype))
        self._read(read, access)
        self._write(written, access)
        self._is_hidden = True  # nothing of what gloo does is observed
        try:
            launch()()  # completed at once: without the wait that may be missing, gloo would hang before the report
        finally:
            self._is_hidden = False
        return SimulatedWait(self, access, (read, written))

    def read_on_host(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.on_host_read(tensor)

    def on_tag(self, tensor: Tensor, kind: TensorKind, on_host: bool) -> None:
        if not self._is_hidden:
            memory = self._memory_of(tensor)
            memory.kind, memory.is_on_host = kind, memory.is_on_host or on_host

    def on_operation(self, function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        roles = None if self._is_hidden else roles_of(function)
        if roles is None or (roles.name == "copy_" and are_the_same_elements(*args[:2])):
            return
        read, written = sorted_arguments(roles, args, kwargs)
        stream, host_waits = self._stream_of(roles, read, written, args, kwargs)
        message: Message = ()
        if self._streams.launches is not None:
            message = (), sum(tensor.nbytes for tensor in instances_in((read, written, output), Tensor)), None
        access = stream.launch(roles.name, message)
        for tensor in read if roles.reads else ():
            self._read(tensor, access)
        for tensor in written:
            self._write(tensor, access)
        for tensor in instances_in((output,), Tensor):
            if storage_id(tensor.untyped_storage()) not in self._storages:
                self._allocate(tensor, access)
                if roles.writes_results:
                    self._write(tensor, access)
        if host_waits:
            stream.synchronize()

    def on_host_read(self, tensor: Tensor) -> None:
        """Record that the host reads the values of a tensor; of one on the device after a wait for its copy."""
        if self._is_hidden or not tensor.numel():
            return
        if self._memory_of(tensor).is_on_host:
            self._read(tensor, self._host.launch("a read"))
        else:
            self._read(tensor, self.current_stream.launch("a copy"))
            self.current_stream.synchronize()

    def on_lost_wait(self, access: Access) -> None:
        """Report a collective whose `Work` has been deleted before anything has waited for it, unless it has raced."""
        if self._is_active and not access.is_reported:
            self._report((access,), f"{access} was launched, and its `Work` was deleted without a `wait`")

    def _stream_of(
        self, roles: Roles, read: list[Tensor], written: list[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[SimulatedStream, bool]:
        """Return the stream that runs an operation, and whether the host waits for it."""
        on_host = [tensor for tensor in (*written, *read) if self._memory_of(tensor).is_on_host]
        if len(on_host) == len(read) + len(written):
            return (self._host if on_host or self.default[1] else self.current_stream), False
        if not on_host:
            return self.current_stream, roles.blocks_host
        if roles.name == "copy_":
            return self.current_stream, not (kwargs.get("non_blocking") or args[2:3] == (True,))
        # Device and host memory are used together: on a GPU one has been copied by `.to`, for which the host waits.
        if written and not self._memory_of(written[0]).is_on_host:
            return self.current_stream, True
        if not written and not any(tensor.dim() for tensor in on_host):
            return self.current_stream, False  # scalars on the host are arguments of the kernel
        self._fetch(tensor for tensor in (*read, *written) if not self._memory_of(tensor).is_on_host)
        return self._host, False

    def _fetch(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors on the device to the host, which waits, unless it knows the values already."""
        for tensor in tensors:
            if not self._memory_of(tensor).is_written_before(*bytes_of(tensor), self._host.clock):
                self._read(tensor, self.current_stream.launch("a copy"))
                self.current_stream.synchronize()

    def _read(self, tensor: Tensor, access: Access) -> None:
        if tensor.numel():
            memory = self._memory_of(tensor)
            if earlier := memory.read(*bytes_of(tensor), access):
                self._report_race(memory, access, "reads", earlier, "written")

    def _write(self, tensor: Tensor, access: Access) -> None:
        if tensor.numel():
            memory = self._memory_of(tensor)
            if earlier := memory.write(*bytes_of(tensor), access):
                self._report_race(memory, access, "overwrites", earlier, "finished")

    def _memory_of(self, tensor: Tensor) -> AccessedMemory:
        """Return the memory of a tensor's storage; if it is new to the checker, as allocated on the current stream."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if (memory := self._storages.get(key)) is None:
            kind, on_host = self.default
            is_on_host = on_host or tensor.device.type != self._device_type
            memory = self._storages[key] = AccessedMemory(self.current_stream, is_on_host, kind)
            memory.reference = weakref.ref(storage, partial(self._on_free, key))
        return memory

    def _allocate(self, tensor: Tensor, access: Access) -> None:
        """Record that an operation has allocated its result."""
        memory = self._memory_of(tensor)
        # Also in a context that allocates on the host: the device writes its results to its own memory.
        memory.is_on_host = access.stream is self._host or tensor.device.type != self._device_type
        if not memory.is_on_host:
            self._take_from_pool(access.name)

    def _on_resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        memory = None if self._is_hidden else self._storages.get(storage_id(storage))
        if memory is None or memory.is_on_host:
            return
        self._pools.free(memory)
        memory.forget()
        if num_bytes:
            memory.owner = self.current_stream
            self._take_from_pool("resize_")

    def _on_free(self, key: int, _reference: weakref.ref) -> None:
        memory = self._storages.pop(key)
        if self._is_active and not memory.is_on_host:
            self._pools.free(memory)

    def _take_from_pool(self, name: str) -> None:
        """Allocate on the current stream, which may be given any memory of its pool."""
        stream = self.current_stream
        for memory, access in self._pools.allocate(stream):
            line = (
                f"memory of {memory.kind} that {access} may still use was freed ({describe(memory.places)}), and "
                f"{name} ({describe(calling_places())}) may be given it: {remedy(access, stream)} before it is freed"
            )
            self._report((access, *memory.places), line)

    def _report_race(self, memory: AccessedMemory, later: Access, does: str, earlier: Access, has_done: str) -> None:
        where = f"{memory.kind} in host memory" if memory.is_on_host else str(memory.kind)
        wait = f"{remedy(earlier, later.stream)} in between"
        self._report((later, earlier), f"{later} {does} {where} before {earlier} has surely {has_done}: {wait}")

    def _report(self, key: tuple[Any, ...], line: str) -> None:
        """Add a report, unless the same lines of code have led to one already."""
        places = tuple((item.name, *item.places) if isinstance(item, Access) else item for item in key)
        for access in instances_in(key, Access):
            access.is_reported = True
        if places not in self._reported:
            self._reported.add(places)
            self.reports.append(line)


@contextmanager
def streams_checked(device: torch.device, *, records_launches: bool = False) -> Iterator[StreamChecker]:
    """Check the streams of this block. Raises StreamError at its end if operations in it would race on a GPU."""
    with StreamChecker(device, records_launches=records_launches) as checker:
        yield checker
    checker.raise_reports()
