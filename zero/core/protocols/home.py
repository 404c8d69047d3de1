"""Homes: the memories in which states of a bucket are at rest, and the devices that compute their updates.

    parameters    rest -- gather, publish --> by way of the accelerator, where transports send
    gradients     reduced on the accelerator -- GradientSum --> the home of the optimizer's states
    update        by `device`, with what `read` and `scalars` give it

`Home` is the memory of the accelerator itself, in which nothing is copied. Another memory is a subclass with
`is_apart`: `new` decides where its tensors are, `device` what computes with them, and `fetch`, `store`, `read`,
`scalars`, `gather`, `publish` and `gradient_sum` copy to and from the accelerator. One whose tensors the CPU reads,
such as those of a mapped file, derives from `OnHost` (zero/homes/on_host.py) and has a `new` of its own. Moments are
allocated by the torch optimizer in its first step, and are in the memory of `new` after `place` of the optimizer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind, allocating
from parallel.mesh import Work
from zero.core.memory.allocators import device_allocator
from zero.core.memory.staging import BufferPool
from zero.core.memory.streams import SideStream
from zero.core.partition.layout import Ranges
from zero.core.protocols.gradient_sum import GradientPath, GradientSum

Publish = Callable[[Tensor, Tensor], Work]
"""Sends own parameters, a view of those that are kept, to the ranks that keep them (`Transport.publish`)."""


class Home:
    """The memory of the accelerator, as the home of states."""

    is_apart = False
    """True if what is here is copied before the accelerator computes with it or sends it."""

    def __init__(self, accelerator: torch.device):
        self.accelerator = accelerator

    @property
    def device(self) -> torch.device:
        """The device that updates what is here."""
        return self.accelerator

    @property
    def pools(self) -> Mapping[str, BufferPool]:
        """The buffers of copies between here and the accelerator, by what they are for."""
        return {}

    def new(self, kind: TensorKind, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor here, not initialized."""
        return device_allocator(self.accelerator, kind)(numel, dtype)

    def allocating(self, kind: TensorKind) -> AbstractContextManager[None]:
        """Return a context in which allocations of `device` count as states, as a torch optimizer makes them.

        It does not choose the memory: `Update.move` copies states to that of `new`.
        """
        return allocating(kind)

    def fetch(self, source: Tensor, out: Tensor, then: Callable[[], Work] = Work) -> Work:
        """Launch a copy of `source`, here, to `out` on the accelerator, and behind it what `then` launches.

        Wait before `out` is read. A copy by `store` to `source` may still be running.
        """
        out.copy_(source)  # returns early if both are the same memory
        return then()

    def store(self, source: Tensor, out: Tensor) -> Work:
        """Launch a copy from the accelerator to `out`, here. Keep the `Work` until its `wait`.

        Wait before `source` is overwritten, and call `settle` before `device` reads `out`.
        """
        out.copy_(source)
        return Work()

    def read(self, sources: Iterable[Tensor]) -> Iterator[Tensor]:
        """Iterate over tensors of the accelerator as `device` reads them, each until the next one is asked for."""
        yield from sources

    def scalars(self, *scalars: Tensor) -> tuple[Tensor, ...]:
        """Return 0-dim tensors of the accelerator as `device` uses them."""
        return scalars

    def settle(self) -> None:
        """Block the host until all copies have ended: `device` may then read their outputs and write their inputs."""

    def gather(self, rest: Tensor, place: Tensor, launch: Callable[[Tensor], Work]) -> Work:
        """Launch a gather of parameters that are kept here; `place` is where the full buffer has them."""
        return launch(rest)

    def publish(self, rest: Tensor, ranges: Ranges, launch: Publish, gather_stream: SideStream) -> Work:
        """Launch a publication of own parameters to `rest`; what copies its result runs on `gather_stream`."""
        return launch(ranges.own_of(rest), rest)

    def gradient_sum(
        self, ranges: Ranges, path: GradientPath, full: Tensor | None, *, gives_means: bool
    ) -> GradientSum:
        """Return the sum of a bucket's gradients that is kept here; `full`: full gradients, if they persist."""
        return GradientSum(ranges, path, partial(self.new, TensorKind.GRADIENTS), full, gives_means=gives_means)

    def reserve(self, numel: int, paths: Iterable[GradientPath]) -> None:
        """Allocate buffers for gradient sums of at most this many elements."""

    def free(self) -> None:
        """Free buffers that only a backward uses."""


@dataclass(frozen=True)
class Homes:
    """The homes in which an engine's states begin."""

    accelerator: Home
    parameters: Home
    """Of parameters that are divided."""
    optimizer: Home
    """Of owned gradients, master weights and moments. If both are apart from the accelerator, they are one."""

    def __post_init__(self) -> None:
        apart = {home for home in (self.parameters, self.optimizer) if home.is_apart}
        if len(apart) > 1 or not {self.accelerator, *apart}.issuperset((self.parameters, self.optimizer)):
            raise ValueError("`Homes` are of one accelerator, and of one other home at most")

    @property
    def device(self) -> torch.device:
        """The accelerator."""
        return self.accelerator.device

    @property
    def all(self) -> list[Home]:
        """Each home once, the accelerator first."""
        return list(dict.fromkeys((self.accelerator, self.parameters, self.optimizer)))

    def settle(self) -> None:
        """Block the host until the copies from and to all homes have ended."""
        for home in self.all:
            home.settle()
