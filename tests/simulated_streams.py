"""Simulated streams on a CPU: what is launched on one runs as late as the program allows.

    compute   the host and its computation, which run at once
    stream    a queue of pieces of work: each runs when the computation or the host waits for it, or for a later piece

Until a piece of work runs, its inputs are not read, and its outputs hold poison: NaN, or the largest integer. So a
missing wait shows as a wrong number. What can be told exactly raises a `Race`: two pieces of work that share memory and
are not ordered, an output that is written before its work has run, and memory that is freed under a piece of work.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes


class Race(AssertionError):
    """A report: on a GPU, the result would depend on which of two streams is faster."""


def poison(tensor: Tensor) -> None:
    """Fill a tensor with what no program computes."""
    tensor.fill_(_poison_of(tensor.dtype))


def is_poison(tensor: Tensor) -> bool:
    value = _poison_of(tensor.dtype)
    return bool((tensor.isnan() if value != value else tensor == value).all())


def _poison_of(dtype: torch.dtype) -> float:
    if dtype is torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


class Region:
    """The memory of a tensor that a piece of work uses, and that it may keep allocated, or not.

    NCCL's work keeps what it uses until the wait, and torch keeps pinned memory until a copy has run. Nothing keeps
    memory of the device for a copy on another stream.
    """

    def __init__(self, tensor: Tensor, *, is_kept: bool):
        storage = tensor.untyped_storage()
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()
        self.storage, self._kept = StorageWeakRef(storage), storage if is_kept else None
        extent = 1 + sum((n - 1) * step for n, step in zip(self._size, self._stride, strict=True))
        start = self._offset * tensor.itemsize
        self.bytes = range(start, start + extent * tensor.itemsize if tensor.numel() else start)

    def overlaps(self, other: "Region") -> bool:
        a, b = self.bytes, other.bytes
        return self.storage.cdata == other.storage.cdata and a.start < b.stop and b.start < a.stop

    def is_same(self, other: "Region") -> bool:
        return self.storage.cdata == other.storage.cdata and self.bytes == other.bytes

    def is_in(self, storage: torch.UntypedStorage) -> bool:
        return self.storage.cdata == storage._cdata

    def tensor(self) -> Tensor:
        """Return the tensor. What is written to it gives the program's own tensors no new version, as with NCCL."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None or storage.nbytes() < self.bytes.stop:
            raise Race("memory was freed before the work that uses it has run")
        return torch.empty(0, dtype=self._dtype).set_(storage, self._offset, self._size, self._stride)


class Output:
    """A region that a piece of work writes; if `is_updated`, it reads it first."""

    def __init__(self, region: Region, *, is_updated: bool):
        self.region, self._is_updated = region, is_updated
        self._is_poisoned, self._saved = False, None

    def arm(self) -> None:
        """Save what the work will read, and poison the region."""
        tensor = self.region.tensor()
        if self._is_updated:
            self._saved = tensor.clone()
        poison(tensor)
        self._is_poisoned = True

    def disarmed(self) -> Tensor:
        """Return the tensor, with what it held before the poison. Raises Race if it is no longer poison."""
        tensor = self.region.tensor()
        if self._is_poisoned and not is_poison(tensor):
            raise Race("an output was written before the work that writes it has run")
        if self._saved is not None:
            tensor.copy_(self._saved)
        return tensor


Action = Callable[[list[Tensor], list[Tensor]], object]  # (inputs, outputs) -> ignored


class Work:
    """A piece of work in a stream: it follows all of `after`, and `action(inputs, outputs)` is called late."""

    def __init__(self, name: str, inputs: Sequence[Region], outputs: Sequence[Output], action: Action):
        self.name, self.inputs, self.outputs, self._action = name, list(inputs), list(outputs), action
        self.number, self.after = -1, frozenset[Work]()
        self._snapshots: dict[int, Tensor] = {}
        self.is_armed = self.has_run = False

    def earlier(self) -> set["Work"]:
        """Return all work that must run before this and has not."""
        found: set[Work] = set()
        following = list(self.after)
        while following:
            if (work := following.pop()) not in found and not work.has_run:
                found.add(work)
                following.extend(work.after)
        return found

    def reads(self, outputs: Sequence[Output]) -> bool:
        return any(mine.overlaps(other.region) for mine in self.inputs for other in outputs)

    def writes(self, regions: Sequence[Region]) -> bool:
        return any(mine.region.overlaps(other) for mine in self.outputs for other in regions)

    def uses(self, storage: torch.UntypedStorage) -> bool:
        return any(r.is_in(storage) for r in (*self.inputs, *(output.region for output in self.outputs)))

    def snapshot(self, outputs: Sequence[Output]) -> None:
        """Read now the inputs that later work of an ordered stream is about to poison."""
        for number, mine in enumerate(self.inputs):
            if number not in self._snapshots and any(mine.overlaps(other.region) for other in outputs):
                updated = [output for output in self.outputs if self.is_armed and output.region.overlaps(mine)]
                for output in updated:
                    output.disarmed()
                self._snapshots[number] = mine.tensor().clone()
                for output in updated:
                    output.arm()

    def run(self) -> None:
        self.has_run = True
        try:
            # The outputs first: one that is updated may be a part of an input.
            outputs = [output.disarmed() for output in self.outputs]
            inputs = [self._snapshots.get(n, None) for n in range(len(self.inputs))]
            inputs = [r.tensor() if s is None else s for r, s in zip(self.inputs, inputs, strict=True)]
            self._action(inputs, outputs)
        except Race as race:
            raise Race(f"{self.name}: {race}") from None
        self.after = frozenset()


class Event:
    """A mark behind all that had been launched on a stream when the event was recorded."""

    def __init__(self, streams: "Streams"):
        self._streams, self.before = streams, frozenset[Work]()

    def record(self, stream: "Stream | None" = None) -> None:
        self.before = (stream or self._streams.current_stream).before

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or self._streams.current_stream).wait_event(self)

    def synchronize(self) -> None:
        self._streams.run(self.before)

    def query(self) -> bool:
        return all(work.has_run for work in self.before)


class Stream:
    """A queue of work. The computation's own stream is one on which nothing ever waits in the queue."""

    def __init__(self, streams: "Streams", *, is_eager: bool = False):
        self._streams, self._is_eager = streams, is_eager
        self.before = frozenset[Work]()  # what the next piece of work must follow

    def wait(self, works: Iterable[Work]) -> None:
        """Let all that is launched from now on run after `works`."""
        if self._is_eager:
            self._streams.run(works)
        else:
            self.before |= {work for work in works if not work.has_run}

    def wait_event(self, event: Event) -> None:
        self.wait(event.before)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait(stream.before)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._streams.run(self.before)

    def query(self) -> bool:
        return all(work.has_run for work in self.before)

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Launch on this stream in this block."""
        outer, self._streams.current_stream = self._streams.current_stream, self
        try:
            with nullcontext() if self._is_eager else self._streams.late_operations(self):
                yield
        finally:
            self._streams.current_stream = outer

    def launch(self, work: Work) -> Work:
        work.after, self.before = self.before, frozenset([work])
        self._streams.launch(work)
        return work


class Streams:
    """All streams of a process, and the work on them that has not run: a simulation for `parallel/streams.py`.

    `late_operations` returns a context in which a side stream takes the operations that it runs late.
    """

    def __init__(self, late_operations: Callable[[Stream], AbstractContextManager[Any]] | None = None) -> None:
        self.late_operations = late_operations or (lambda stream: nullcontext())
        self.compute = Stream(self, is_eager=True)
        self.pending: list[Work] = []  # in the order of launches
        self.on_host: list[Region] = []  # memory that the project allocates in the host's memory
        self.num_launched = 0
        self._numbers = itertools.count()
        self.current_stream = self.compute
        self.is_running = False  # work runs, and what it calls is not launched again

    def new_stream(self) -> Stream:
        return Stream(self)

    def read_on_host(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: what has not run yet holds poison, which the host reads."""

    def raise_reports(self) -> None:
        """Do nothing: a race is raised at once."""

    def launch(self, work: Work) -> None:
        """Poison the outputs of new work. Raises Race if it shares memory with work that it does not follow."""
        work.number, self.num_launched = next(self._numbers), self.num_launched + 1
        earlier = work.earlier()
        regions = [*work.inputs, *(output.region for output in work.outputs)]
        for other in self.pending:
            if other not in earlier and (other.writes(regions) or other.reads(work.outputs)):
                raise Race(f"{work.name} does not wait for {other.name}, which uses the same memory")
        self.pending.append(work)
        self._arm()

    def run(self, works: Iterable[Work]) -> None:
        """Run work, and before it all that it follows, in the order of launches."""
        due = {work for work in works if not work.has_run}
        for work in list(due):
            due |= work.earlier()
        for work in sorted(due, key=lambda work: work.number):
            self.pending.remove(work)
            with self._alone():
                work.run()
            self._arm()

    def run_all(self) -> None:
        self.run(list(self.pending))

    def before_free(self, storage: torch.UntypedStorage) -> None:
        """Raise Race if work that has not run uses the memory."""
        for work in self.pending:
            if work.uses(storage):
                raise Race(f"memory is freed before {work.name} has run, which uses it")

    def _arm(self) -> None:
        """Poison the outputs of work, unless earlier work still has to write them."""
        with self._alone():
            for number, work in enumerate(self.pending):
                before = self.pending[:number]
                regions = [output.region for output in work.outputs]
                if work.is_armed or any(other.writes(regions) for other in before):
                    continue
                for other in before:
                    other.snapshot(work.outputs)
                for output in work.outputs:
                    output.arm()
                work.is_armed = True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        was_running, self.is_running = self.is_running, True
        try:
            with torch.no_grad(), _disable_current_modes():
                yield
        finally:
            self.is_running = was_running
