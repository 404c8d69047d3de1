"""Streams: CUDA's on a GPU, simulated ones while a simulation is active, none on a CPU, which runs everything at once.

The other files of `zero` and `parallel` take streams from here, so that a run on a CPU can be followed as if it were on
a GPU (lab/races/stream_checker.py).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel.torch_internals import active_observers


class StreamSimulation(Protocol):
    """An observer of operations that follows a run as if each stream were one of a GPU.

    `simulates_streams` is True; it distinguishes such an observer from others. Its streams have the methods of CUDA's.
    """

    simulates_streams: bool

    @property
    def current_stream(self) -> Any: ...

    def new_stream(self) -> Any: ...

    def collective(
        self, group: Any, event: Any, launch: Callable[[], Callable[[], object]], read: Tensor, written: Tensor
    ) -> Callable[[], object]:
        """Launch a collective, unobserved, and return the function by which the current stream waits for it."""

    def read_on_host(self, tensors: Iterable[Tensor]) -> None: ...

    def raise_reports(self) -> None: ...


def active_simulation() -> StreamSimulation | None:
    """Return the simulation that follows this thread, if there is one."""
    return next((one for one in active_observers() if getattr(one, "simulates_streams", False)), None)


def new_stream(device: torch.device) -> Any:
    """Return a new stream that runs beside the computation; None on a CPU without a simulation."""
    if simulation := active_simulation():
        return simulation.new_stream()
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def current_stream(device: torch.device) -> Any:
    """Return the stream on which operations are launched; None on a CPU without a simulation."""
    if simulation := active_simulation():
        return simulation.current_stream
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def using(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which operations are launched on `stream`."""
    return stream.as_current() if hasattr(stream, "as_current") else torch.cuda.stream(stream)


def wait_event(device: torch.device, event: Any) -> None:
    """Make the current stream wait for an event of another one; a stream of the same kind has recorded it."""
    if stream := current_stream(device):
        stream.wait_event(event)


def synchronize(device: torch.device) -> None:
    """Block the host until all that has been launched on the current stream has run."""
    if stream := current_stream(device):
        stream.synchronize()


def announce_host_read(tensors: Iterable[Tensor]) -> None:
    """Tell a simulation that the host reads tensors in another thread, which it cannot observe."""
    if simulation := active_simulation():
        simulation.read_on_host(tensors)


def raise_races() -> None:
    """Raise an error if a simulation has found operations that would race on a GPU."""
    if simulation := active_simulation():
        simulation.raise_reports()
