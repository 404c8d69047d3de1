"""Side streams: work that runs at the same time as the computation.

No other file of `zero` chooses a stream. A CPU has none, and runs everything at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from parallel.mesh import Work
from parallel.streams import current_stream, new_stream, using, wait_event


class SideStream:
    """A CUDA stream that runs what is launched on it in order: copies to the host and back, and gathers behind them.

    Memory is handed from stream to stream by waiting, never by `record_stream`. What is launched here runs after all
    that the computation had queued before the launch; the computation waits on `device_work()` before it reads or
    frees the memory.
    """

    def __init__(self, device: torch.device):
        self._stream, self._device = new_stream(device), device

    @contextmanager
    def context(self) -> Iterator[None]:
        """Launch on the side stream what is launched in here."""
        if self._stream is None:
            yield
            return
        # First, so that the side stream reads what the computation has written so far.
        self._stream.wait_stream(current_stream(self._device))
        with using(self._stream):
            yield

    def launch_after(self, first: Work, launch: Callable[[], Work]) -> Work:
        """Launch a collective that reads the output of `first`, and return its `Work`.

        It is launched at once if there are streams, and else when the result is waited for.
        """
        if self._stream is None:
            return first.then(launch)
        with self.context():
            return first.then_beside(launch)

    def device_work(self) -> Work:
        """Return a `Work` whose `wait` makes the current stream wait for what has been launched here so far."""
        if self._stream is None:
            return Work()
        event, device = self._stream.record_event(), self._device
        return Work(lambda: wait_event(device, event))

    def host_work(self) -> Work:
        """Return a `Work` whose `wait` blocks the host until all that has been launched here so far has run."""
        return Work() if self._stream is None else Work(self._stream.record_event().synchronize)


def launched_work(device: torch.device) -> Callable[[], bool]:
    """Return a function that returns, without a wait, whether the computation that was queued so far has run."""
    stream = current_stream(device)
    return stream.record_event().query if stream else lambda: True
