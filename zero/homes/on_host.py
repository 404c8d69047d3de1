"""Host memory as the home of states, which the host updates.

    accelerator     full parameters and gradients while in use, and the states that are placed there
                        | gradients, reduced     ^ parameters, cast     each direction on a side stream of its own
                        v                        |
    host (pinned)   the states that are placed there

On a CPU both are host memory: the same copies are made, in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind, allocating
from parallel.mesh import Work
from parallel.torch_internals import storage_id
from zero.core.memory.allocators import device_allocator, host_allocator
from zero.core.memory.staging import BufferPool
from zero.core.memory.streams import SideStream
from zero.core.partition.layout import Ranges
from zero.core.protocols.gradient_sum import GradientPath, GradientSum, scale_into
from zero.core.protocols.home import Home, Publish

NUM_BUFFERS = 2  # on the way from one memory to the other: one is filled while the other is copied


class OnHost(Home):
    """Host memory, pinned if the accelerator is a GPU, and copies to and from it on side streams.

    `fetch` reads `source` asynchronously if both types are equal: the host calls `settle` before it overwrites it. If
    they differ, the host casts it into a buffer first, and may overwrite it when `fetch` returns.
    """

    is_apart = True

    def __init__(self, accelerator: torch.device):
        super().__init__(accelerator)
        self._to_host, self._to_accelerator = SideStream(accelerator), SideStream(accelerator)
        on_host = host_allocator(accelerator, TensorKind.BUFFERS)
        self._reads = BufferPool(on_host, num_in_turn=NUM_BUFFERS)
        self._casts = BufferPool(on_host, num_in_turn=NUM_BUFFERS)  # on their way to the accelerator
        on_accelerator = device_allocator(accelerator, TensorKind.BUFFERS)
        self._relays = BufferPool(on_accelerator, num_in_turn=NUM_BUFFERS)  # of what is stored here, and sent there
        self.gradients = BufferPool(on_accelerator)
        """For gradients on their way to the host, if they are cast, and from there, if there are several
        micro-batches."""
        self._landing: dict[int, Work] = {}  # the last copy to each storage in host memory

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def pools(self) -> Mapping[str, BufferPool]:
        return {"gradients for the host": self.gradients, "shards for the host": self._relays}

    def new(self, kind: TensorKind, numel: int, dtype: torch.dtype) -> Tensor:
        return host_allocator(self.accelerator, kind)(numel, dtype)

    def allocating(self, kind: TensorKind) -> AbstractContextManager[None]:
        return allocating(kind, on_host=True)

    def fetch(self, source: Tensor, out: Tensor, then: Callable[[], Work] = Work) -> Work:
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

    def store(self, source: Tensor, out: Tensor) -> Work:
        with self._to_host.context():
            out.copy_(source, non_blocking=True)
        self._landing[storage_id(out.untyped_storage())] = self._to_host.device_work()
        return Work(self._to_host.device_work().wait, lambda: source)  # the `Work` keeps `source` allocated

    def read(self, sources: Iterable[Tensor]) -> Iterator[Tensor]:
        """Iterate over copies of tensors: the next one is copied while the caller uses this one."""
        reads = map(self._start_read, sources)
        following = next(reads, None)
        while following is not None:
            (copy, copied), following = following, next(reads, None)
            copied.wait()
            yield copy

    def scalars(self, *scalars: Tensor) -> tuple[Tensor, ...]:
        """Return copies of 0-dim tensors, for which the host waits."""
        return tuple(self.new(TensorKind.BUFFERS, 1, each.dtype).copy_(each)[0] for each in scalars)

    def settle(self) -> None:
        self._to_host.host_work().wait()
        self._to_accelerator.host_work().wait()
        self._landing.clear()

    def gather(self, rest: Tensor, place: Tensor, launch: Callable[[Tensor], Work]) -> Work:
        return self.fetch(rest, place, partial(launch, place))  # behind the copy, in place

    def publish(self, rest: Tensor, ranges: Ranges, launch: Publish, gather_stream: SideStream) -> Work:
        buffer = self._relays.take(rest.dtype, rest.numel())
        relay = buffer[: rest.numel()]
        own = ranges.own_of(relay)
        sent = self.fetch(ranges.own_of(rest), own, partial(launch, own, relay))
        copied = gather_stream.launch_after(sent, partial(self.store, relay, out=rest))
        self._relays.put_back(buffer, copied)
        return copied

    def gradient_sum(
        self, ranges: Ranges, path: GradientPath, full: Tensor | None, *, gives_means: bool
    ) -> GradientSum:
        return SumOnHost(self, ranges, path, gives_means=gives_means)

    def reserve(self, numel: int, paths: Iterable[GradientPath]) -> None:
        casts = dict.fromkeys(path.types.accumulate for path in paths if _is_cast(path))
        self.gradients.reserve(numel, casts)

    def free(self) -> None:
        self.gradients.free()

    def _start_read(self, source: Tensor) -> tuple[Tensor, Work]:
        """Launch a copy to one of a few pinned buffers; return it with a `Work` that blocks the host."""
        buffer = self._reads.take(source.dtype, source.numel())
        self._reads.put_back(buffer, Work())  # its turn comes again after that of the other one
        copy = buffer[: source.numel()]
        self.store(source, copy)
        return copy, self._to_host.host_work()


class SumOnHost(GradientSum):
    """A sum in host memory, which is added up on the accelerator: there and back for each micro-batch."""

    is_apart = True

    def __init__(self, home: OnHost, ranges: Ranges, path: GradientPath, *, gives_means: bool):
        self._home = home
        super().__init__(ranges, path, partial(home.new, TensorKind.GRADIENTS), None, gives_means=gives_means)

    @contextmanager
    def on_accelerator(self, last_read: Callable[[], Work]) -> Iterator[Tensor]:
        """Yield a copy."""
        fetched, total = self._take()
        # The reader waits for the copy on the device, and the host waits for nothing.
        self._home.fetch(self.rest, out=total).wait()
        yield total
        self._home.gradients.put_back(fetched, last_read())

    @contextmanager
    def summed_here(self, *, is_last: bool) -> Iterator[Tensor]:
        buffer, total = self._take()
        if self.has_sum:
            self._home.fetch(self.rest, out=total).wait()
        yield total
        self._end_sum(total, is_last=is_last)
        self.last_read = self._home.store(total, out=self.rest)
        self._home.gradients.put_back(buffer, self.last_read)

    def _receive(self, values: Tensor, out: Tensor, scale: float, *, adds: bool, is_last: bool) -> None:
        total, cast = values, None
        if _is_cast(self.path):
            cast = self._home.gradients.take(self.path.types.accumulate, values.numel())
            total = cast[: values.numel()]
        scale_into(total, values, scale)
        if adds:
            with self.on_accelerator(Work) as earlier:
                total.add_(earlier)
        self._end_sum(total, is_last=is_last)
        self.last_read = self._home.store(total, out=out)
        if cast is not None:
            self._home.gradients.put_back(cast, self.last_read)

    def _fetched(self, aside: Tensor) -> Tensor:
        """Return a copy, so that the host does not wait for the device."""
        allocate = device_allocator(self._home.accelerator, TensorKind.GRADIENTS)
        fetched = allocate(aside.numel(), self.path.types.accumulate)
        self._home.fetch(aside, out=fetched).wait()
        return fetched

    def _take(self) -> tuple[Tensor, Tensor]:
        """Return a buffer on the accelerator, and a view of it as long as `rest`."""
        buffer = self._home.gradients.take(self.path.types.accumulate, self.rest.numel())
        return buffer, buffer[: self.rest.numel()]


def _is_cast(path: GradientPath) -> bool:
    """Return whether a reduced message is cast before it is copied to the host."""
    return path.types.accumulate is not path.types.reduce
